"""Lets one position too many through the check."""


def slot_mapping_for(block_table, positions, block_size):
    if block_size < 1:
        raise ValueError
    slots = []
    for position in positions:
        if position < 0 or position > len(block_table) * block_size:
            raise ValueError
        logical = min(position // block_size, len(block_table) - 1)
        slots.append(block_table[logical] * block_size + position % block_size)
    return slots
