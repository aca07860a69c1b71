"""Which token takes a block, block size 1, the same token twice, and an empty pool."""


def grow(append_block, block_size, upto):
    """The token numbers at which a table grows when tokens 1 to upto are appended one by one."""
    table, free, at = [], list(range(100)), []
    for num_tokens in range(1, upto + 1):
        before = len(table)
        assert append_block(table, num_tokens, block_size,
                            free) is True, f"token {num_tokens} got no place"
        if len(table) > before:
            at.append(num_tokens)
    return at


def cases():
    yield "the lengths of the chapter, block size 256", """
        table, free = [0], [9]
        append_block(table, 256, 256, free)         # → True
        table                                       # → [0]
        append_block(table, 257, 256, free)         # → True
        table                                       # → [0, 9]
    """
    yield "one token after another", """
        grow(append_block, 4, 13)                   # → [1, 5, 9, 13]
        grow(append_block, 3, 8)                    # → [1, 4, 7]
    """
    yield "block size 1: every token takes a block", """
        grow(append_block, 1, 4)                    # → [1, 2, 3, 4]
    """
    yield "the first token of a request with an empty table", """
        table, free = [], [5]
        append_block(table, 1, 4, free)             # → True
        table                                       # → [5]
    """
    yield "the same token twice, at every place in a block", """
        table, free = [0], [1, 2, 3]
        [append_block(table, n, 2, free) for n in (2, 2, 3, 3, 4, 4)]      # → [True] * 6
        table                                       # → [0, 1]
        free                                        # → [2, 3]
    """
    yield "no free block, and none needed", """
        table = [7]
        [append_block(table, n, 4, []) for n in (2, 3, 4)]                 # → [True, True, True]
        table                                       # → [7]
    """
    yield "no free block, and one needed", """
        table, free = [7], []
        append_block(table, 5, 4, free)             # → False
        table                                       # → [7]
        free                                        # → []
    """
    yield "the first of the free blocks is taken", """
        table, free = [2], [8, 1, 5]
        append_block(table, 5, 4, free)             # → True
        append_block(table, 9, 4, free)             # → True
        table                                       # → [2, 8, 1]
        free                                        # → [5]
    """
