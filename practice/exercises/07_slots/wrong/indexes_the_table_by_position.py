"""Divides the position, but forgets to look the block up: right only when the table counts 0, 1, 2."""


def slot_mapping_for(block_table, positions, block_size):
    if block_size < 1:
        raise ValueError
    slots = []
    for position in positions:
        if not 0 <= position < len(block_table) * block_size:
            raise ValueError
        slots.append(position // block_size * block_size + position % block_size)
    return slots
