"""The three ways, the two prompts of the chapter, hits that are free blocks, and failures without a
trace."""


def empty(num_blocks, block_size):
    """(block_size, ref_cnt, free) of a cache in which nothing is held and nothing known."""
    return block_size, [0] * num_blocks, list(range(num_blocks))


def partition(cache):
    """Free and held blocks: every block must be exactly one of the two."""
    free = [block for block, count in enumerate(cache.ref_cnt) if count == 0]
    return sorted(cache.free) == free


def cases():
    yield "nothing is known: every block is new", """
        cache = Cache(*empty(4, 2))
        take_blocks([1, 2, 3], cache)               # → [("ALLOCATE", 0), ("ALLOCATE", 1)]
        cache.ref_cnt                               # → [1, 1, 0, 0]
        cache.free                                  # → [2, 3]
        cache.block_of                              # → {}
    """
    yield "the two prompts of the chapter: 406 and 409 tokens that share more than 256", """
        cache = Cache(*empty(2234, 256))
        one, other = [7] * 300 + [1] * 106, [7] * 300 + [2] * 109
        take_blocks(one, cache)                     # → [("ALLOCATE", 0), ("ALLOCATE", 1)]
        len(cache.free)                             # → 2232
        cache.block_of = {block_hashes(one, 256)[0]: 0}
        take_blocks(other, cache)                   # → [("REUSE", 0), ("ALLOCATE", 2)]
        len(cache.free)                             # → 2231
        cache.ref_cnt[:3]                           # → [2, 1, 1]
    """
    yield "after a miss everything misses", """
        cache = Cache(*empty(5, 2))
        hashes = block_hashes([1, 2, 3, 4, 5, 6], 2)
        cache.block_of = {hashes[0]: 3, hashes[2]: 4}
        take_blocks([1, 2, 3, 4, 5, 6, 7], cache)   # → [("REACTIVATE", 3), ("ALLOCATE", 0),
                                                    #    ("ALLOCATE", 1), ("ALLOCATE", 2)]
    """
    yield "a whole prompt that is known, at every length of its last block", """
        cache = Cache(*empty(8, 2))
        hashes = block_hashes([1, 2, 3, 4], 2)
        cache.block_of = {hashes[0]: 6, hashes[1]: 7}
        take_blocks([1, 2], cache)                  # → [("ALLOCATE", 0)]
        take_blocks([1, 2, 3], cache)               # → [("REACTIVATE", 6), ("ALLOCATE", 1)]
        take_blocks([1, 2, 3, 4], cache)            # → [("REUSE", 6), ("ALLOCATE", 2)]
        take_blocks([1, 2, 3, 4, 5], cache)   # → [("REUSE", 6), ("REACTIVATE", 7), ("ALLOCATE", 3)]
    """
    yield "one token", """
        cache = Cache(*empty(2, 1))
        cache.block_of = {block_hashes([5], 1)[0]: 1}
        take_blocks([5], cache)                     # → [("ALLOCATE", 0)]
    """
    yield "a later hit must not be handed out as a new block", """
        cache = Cache(*empty(3, 2))
        hashes = block_hashes([1, 2, 3, 4], 2)
        cache.block_of = {hashes[0]: 1, hashes[1]: 0}
        take_blocks([1, 2, 3, 4, 5], cache)         # → [("REACTIVATE", 1), ("REACTIVATE", 0),
                                                    #    ("ALLOCATE", 2)]
        cache.ref_cnt                               # → [1, 1, 1]
        cache.free                                  # → []
    """
    yield "the hits are themselves the only free blocks: nothing is taken", """
        cache = Cache(2, [0, 0, 1], [0, 1])
        hashes = block_hashes([1, 2, 3, 4], 2)
        cache.block_of = {hashes[0]: 0, hashes[1]: 1}
        take_blocks([1, 2, 3, 4, 5], cache)         # → None
        cache.ref_cnt                               # → [0, 0, 1]
        cache.free                                  # → [0, 1]
        cache.block_of == {hashes[0]: 0, hashes[1]: 1}          # → True
    """
    yield "hits that others hold cost nothing", """
        cache = Cache(2, [1, 3, 0], [2])
        hashes = block_hashes([1, 2, 3, 4], 2)
        cache.block_of = {hashes[0]: 0, hashes[1]: 1}
        take_blocks([1, 2, 3, 4, 5], cache)        # → [("REUSE", 0), ("REUSE", 1), ("ALLOCATE", 2)]
        cache.ref_cnt                               # → [2, 4, 1]
    """
    yield "too few blocks: counts, queue and entries stay", """
        cache = Cache(2, [1, 0, 0], [2, 1])
        hashes = block_hashes([1, 2, 8, 8], 2)
        cache.block_of = {hashes[0]: 0, hashes[1]: 2}
        take_blocks([1, 2, 3, 4, 5, 6, 7], cache)   # → None
        cache.ref_cnt                               # → [1, 0, 0]
        cache.free                                  # → [2, 1]
        cache.block_of == {hashes[0]: 0, hashes[1]: 2}          # → True
    """
    yield "what is handed out anew is forgotten, what is matched is not", """
        cache = Cache(*empty(3, 2))
        known, gone = block_hashes([1, 2], 2)[0], block_hashes([8, 8], 2)[0]
        cache.block_of = {known: 2, gone: 0}
        take_blocks([1, 2, 3], cache)               # → [("REACTIVATE", 2), ("ALLOCATE", 0)]
        cache.block_of == {known: 2}                # → True
    """
    yield "a reactivated block leaves the middle of the queue", """
        cache = Cache(2, [0] * 5, [4, 2, 0, 3, 1])
        cache.block_of = {block_hashes([1, 2], 2)[0]: 0}
        take_blocks([1, 2, 3], cache)               # → [("REACTIVATE", 0), ("ALLOCATE", 4)]
        cache.free                                  # → [2, 3, 1]
        partition(cache)                            # → True
    """
