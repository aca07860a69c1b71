"""One row for each token: order, edges of blocks, positions without a block."""


def dealt_out(num_requests, blocks_each):
    """Block tables as they come about when blocks are dealt out one at a time in turn."""
    return [[i * num_requests + r for i in range(blocks_each)] for r in range(num_requests)]


def all_slots(slot_mapping_for, tables, block_size):
    """The slots of all positions of all tables together, sorted."""
    return sorted(slot for table in tables
                  for slot in slot_mapping_for(table, range(len(table) * block_size), block_size))


def cases():
    yield "the two prompts of the chapter, which share a block of 256", """
        slots = slot_mapping_for([0, 1], range(430), 256)
        (slots[0], slots[-1], len(slots))                       # → (0, 429, 430)
        slots = slot_mapping_for([0, 2], range(256, 433), 256)
        (slots[0], slots[-1], len(slots))                       # → (512, 688, 177)
    """
    yield "the first decode after them", """
        slot_mapping_for([0, 1], [430], 256)                    # → [430]
        slot_mapping_for([0, 2], [433], 256)                    # → [689]
    """
    yield "first and last position of a block", """
        slot_mapping_for([9, 4], [3, 4], 4)                     # → [39, 16]
        slot_mapping_for([9, 4], [0, 7], 4)                     # → [36, 19]
    """
    yield "block size 1: the table is the mapping", """
        slot_mapping_for([4, 2, 9], range(3), 1)                # → [4, 2, 9]
    """
    yield "a block size that is no power of two", """
        slot_mapping_for([2, 0], range(6), 3)                   # → [6, 7, 8, 0, 1, 2]
    """
    yield "slots come in the order of the positions", """
        slot_mapping_for([7, 1, 3], [8, 0, 5, 0], 4)            # → [12, 28, 5, 28]
    """
    yield "any iterable, read once", """
        slot_mapping_for([7, 1], (p for p in (1, 4)), 4)        # → [29, 4]
        slot_mapping_for([7, 1], iter([]), 4)                   # → []
    """
    yield "no positions, no blocks", """
        slot_mapping_for([], [], 4)                             # → []
        slot_mapping_for([], [0], 4)                            # raises ValueError
    """
    yield "the position after the last block", """
        slot_mapping_for([7, 1], [7], 4)                        # → [7]
        slot_mapping_for([7, 1], [8], 4)                        # raises ValueError
        slot_mapping_for([7, 1], [0, 1, 8], 4)                  # raises ValueError
    """
    yield "a negative position must not count from the end", """
        slot_mapping_for([7, 1], [-1], 4)                       # raises ValueError
        slot_mapping_for([7, 1], [-8], 4)                       # raises ValueError
    """
    yield "a block size below 1, even with no positions", """
        slot_mapping_for([7, 1], [], 0)                         # raises ValueError
        slot_mapping_for([7, 1], [0], -4)                       # raises ValueError
    """
    yield "the table is left as it was", """
        table = [7, 1, 3]
        slot_mapping_for(table, range(12), 4)[-1]               # → 15
        table                                                   # → [7, 1, 3]
    """
    yield "no two tokens of a pool share a row, and no row is left out", """
        all_slots(slot_mapping_for, dealt_out(3, 5), 4) == list(range(60))      # → True
        all_slots(slot_mapping_for, dealt_out(4, 2), 7) == list(range(56))      # → True
    """
