"""Works block by block, and so returns the slots in ascending order of position, each once."""


def slot_mapping_for(block_table, positions, block_size):
    if block_size < 1:
        raise ValueError
    positions = set(positions)
    if any(not 0 <= p < len(block_table) * block_size for p in positions):
        raise ValueError
    slots = []
    for logical, block in enumerate(block_table):
        for offset in range(block_size):
            if logical * block_size + offset in positions:
                slots.append(block * block_size + offset)
    return slots
