"""Leaves the check to Python: too large raises IndexError, and -1 quietly names the last block."""


def slot_mapping_for(block_table, positions, block_size):
    if block_size < 1:
        raise ValueError
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]
