from collections.abc import Iterable


def slot_mapping_for(block_table: list[int], positions: Iterable[int],
                     block_size: int) -> list[int]:
    """Slots of the given token positions of a request."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: a block holds at least one token")
    capacity = len(block_table) * block_size
    slots = []
    for position in positions:
        if not 0 <= position < capacity:
            raise ValueError(
                f"position {position} has no block: the table holds {capacity} positions")
        logical, offset = divmod(position, block_size)
        slots.append(block_table[logical] * block_size + offset)
    return slots
