"""Takes the offset modulo the length of the table instead of the block size."""


def slot_mapping_for(block_table, positions, block_size):
    if block_size < 1:
        raise ValueError
    slots = []
    for position in positions:
        if not 0 <= position < len(block_table) * block_size:
            raise ValueError
        slots.append(block_table[position // block_size] * block_size + position % len(block_table))
    return slots
