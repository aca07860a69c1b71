"""Full and computed, once each, chained, and never in the place of another block."""


def request_hash(request, count, size=4):
    """The chained hash of the first `count` blocks, in the arithmetic of the starter."""
    parent = None
    for index in range(count):
        parent = hash((parent, *request.token_ids[index * size:(index + 1) * size]))
    return parent


def cases():
    yield "the lengths of the chapter: 255, 256 and 257 tokens in blocks of 256", """
        request, block_of = Request(list(range(300)), [0, 1]), {}
        register_computed(request, 255, 256, block_of)      # → 0
        register_computed(request, 256, 256, block_of)      # → 1
        register_computed(request, 257, 256, block_of)      # → 0
        block_of == {request_hash(request, 1, 256): 0}      # → True
    """
    yield "computed counts, not how many tokens there are", """
        request, block_of = Request([1, 2, 3, 4, 5, 6, 7, 8], [7, 2]), {}
        register_computed(request, 3, 4, block_of)          # → 0
        block_of                                            # → {}
    """
    yield "several blocks in one step, each under its own prefix", """
        request, block_of = Request([1, 1, 1, 1, 1, 1, 1], [4, 6, 5, 3]), {}
        register_computed(request, 7, 2, block_of)          # → 3
        [block_of[request_hash(request, n, 2)] for n in (1, 2, 3)]      # → [4, 6, 5]
        len(block_of)                                       # → 3
    """
    yield "the chain goes on over calls", """
        request, block_of = Request([9, 9, 9, 9, 9, 9, 9, 9], [3, 1]), {}
        register_computed(request, 4, 4, block_of)          # → 1
        request.num_registered                              # → 1
        request.last_hash == request_hash(request, 1)       # → True
        register_computed(request, 8, 4, block_of)          # → 1
        block_of[request_hash(request, 2)]                  # → 1
        request.last_hash == request_hash(request, 2)       # → True
    """
    yield "asked again, nothing is left to do", """
        request, block_of = Request([1, 2, 3, 4], [7]), {}
        register_computed(request, 4, 4, block_of)          # → 1
        register_computed(request, 4, 4, block_of)          # → 0
        len(block_of)                                       # → 1
        request.num_registered                              # → 1
    """
    yield "the same content in two blocks: the first entry stays", """
        one, other, block_of = Request([1, 2, 3, 4], [7]), Request([1, 2, 3, 4], [2]), {}
        register_computed(one, 4, 4, block_of)              # → 1
        register_computed(other, 4, 4, block_of)            # → 1
        list(block_of.values())                             # → [7]
        other.block_table                                   # → [2]
        other.num_registered                                # → 1
    """
    yield "behind a block that was there already, the chain still holds", """
        one, other = Request([1, 2, 3, 4], [7]), Request([1, 2, 3, 4, 5, 6, 7, 8], [2, 3])
        block_of = {}
        register_computed(one, 4, 4, block_of)              # → 1
        register_computed(other, 8, 4, block_of)            # → 2
        block_of[request_hash(other, 2)]                    # → 3
    """
    yield "a request that began with cached blocks", """
        request = Request([1, 2, 3, 4, 5, 6, 7, 8], [7, 2], num_registered=1)
        request.last_hash = request_hash(request, 1)
        block_of = {request.last_hash: 7}
        register_computed(request, 8, 4, block_of)          # → 1
        block_of == {request_hash(request, 1): 7, request_hash(request, 2): 2}      # → True
    """
    yield "tokens and table are left as they were", """
        request = Request([1, 2, 3, 4, 5], [7, 2])
        register_computed(request, 5, 4, {})                # → 1
        request.token_ids                                   # → [1, 2, 3, 4, 5]
        request.block_table                                 # → [7, 2]
    """
