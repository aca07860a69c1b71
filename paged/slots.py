"""From a request's block table to the rows of the cache.

The mapping layer. A slot is the number of a row in the K/V cache:

    slot = block × block_size + offset          position = logical block × block_size + offset

    position        0  1  2  3 │ 4  5  6  7 │ 8 ...
    logical block   0          │ 1          │ 2
    block table     7            1            3         (block size 4)
    slot           28 29 30 31 │ 4  5  6  7 │ 12 ...

Plain Python: the same arithmetic runs on the GPU in `paged.attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def slot_mapping_for(block_table: Sequence[int], positions: Iterable[int],
                     block_size: int) -> list[int]:
    """Slots of the given token positions.

    Args:
        block_table: physical block of each logical block.
        positions: token positions, counted from the start of the request.
        block_size: tokens a block.

    Raises ValueError for a position without a block (the −1 that pads a table is none), and for a
    block size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: a block holds at least one token")
    slots = []
    capacity = len(block_table) * block_size
    for position in map(int, positions):  # of an array or a tensor, too: slots are ints
        if not 0 <= position < capacity:
            held = f"positions 0 to {capacity - 1}" if capacity else "none"
            raise ValueError(
                f"position {position} has no block: a table of {len(block_table)} blocks of "
                f"{block_size} holds {held}")
        block = int(block_table[position // block_size])
        if block < 0:
            raise ValueError(f"position {position} has no block: its entry in the table is {block}")
        slots.append(block * block_size + position % block_size)
    return slots


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens: the quotient, rounded up."""
    return -(-num_tokens // block_size)
