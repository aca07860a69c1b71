from collections.abc import Iterable


def slot_mapping_for(block_table: list[int], positions: Iterable[int],
                     block_size: int) -> list[int]:
    """Slots of the given token positions of a request."""
    raise NotImplementedError
