"""Slot arithmetic: which row of the cache belongs to which token.

Protects the rows of a block, the table that wraps, and the slots, offsets and lengths of a batch
that shares a prefix, where 865 is the sum of two lengths and not 607 and some overhead.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged import slot_mapping_for
from paged.slots import blocks_needed


def test_rows_of_a_block():
    assert slot_mapping_for([3], range(256), 256) == list(range(768, 1024))
    assert slot_mapping_for([7], range(256), 256) == list(range(1792, 2048))


def test_slots_follow_the_table_and_not_the_position():
    assert slot_mapping_for([5, 6, 7, 0], range(14), 4) == [*range(20, 32), 0, 1]
    assert slot_mapping_for([7, 1, 3], range(9), 4) == [28, 29, 30, 31, 4, 5, 6, 7, 12]
    assert slot_mapping_for([7, 1, 3], iter([8, 0, 3]), 4) == [12, 28, 31], "in the order asked for"


def test_a_batch_that_shares_a_prefix():
    """Prompts of 430 and 433 tokens, the first block in common."""
    lengths, cached, tables, block_size = [430, 433], [0, 256], [[0, 1], [0, 2]], 256
    slots = [
        slot_mapping_for(table, range(start, end), block_size)
        for table, start, end in zip(tables, cached, lengths)
    ]
    assert slots[0] == list(range(430)) and slots[1] == list(range(512, 689))
    assert [len(part) for part in slots] == [430, 177]

    query_start_loc = [0, *itertools.accumulate(end - start for start, end in zip(cached, lengths))]
    key_start_loc = [0, *itertools.accumulate(lengths)]
    assert query_start_loc == [0, 430, 607]
    assert key_start_loc == [0, 430, 863]
    assert key_start_loc[-1] > query_start_loc[-1], "keys that no query of this step brought along"

    decode = [length + 1 for length in lengths]
    assert decode == [431, 434] and sum(decode) == 865 == key_start_loc[-1] + len(lengths)
    assert [
        slot_mapping_for(table, [length - 1], block_size) for table, length in zip(tables, decode)
    ] == [[430], [689]]


@given(block_size=st.integers(1, 9), table=st.lists(st.integers(0, 30), unique=True, max_size=6))
def test_every_position_has_a_row_of_its_own(block_size, table):
    slots = slot_mapping_for(table, range(len(table) * block_size), block_size)
    assert len(set(slots)) == len(slots)
    assert [slot // block_size
            for slot in slots] == [block for block in table for _ in range(block_size)]
    assert [slot % block_size for slot in slots] == [*range(block_size)] * len(table)


@pytest.mark.parametrize("position", [-1, 12, 1000])
def test_a_position_without_a_block_is_refused(position):
    """Python would take −1 for the last block, and a wrong slot writes into another request's
    context."""
    with pytest.raises(ValueError,
                       match=f"position {position} has no block.* holds positions 0 to 11"):
        slot_mapping_for([7, 1, 3], [0, position], 4)


def test_an_empty_table_has_no_slots():
    assert slot_mapping_for([], [], 4) == []
    with pytest.raises(ValueError, match="position 0 has no block"):
        slot_mapping_for([], [0], 4)


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_holds_at_least_one_token(block_size):
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        slot_mapping_for([0], [], block_size)


def test_blocks_needed_rounds_up():
    assert [blocks_needed(n, 4) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_slots_are_ints_whatever_the_table_and_the_positions_are():
    import numpy as np
    slots = slot_mapping_for(np.array([5, 6]), np.arange(3, 6), 4)
    assert slots == [23, 24, 25] and {type(slot) for slot in slots} == {int}


def test_the_padding_of_a_table_is_no_block():
    with pytest.raises(ValueError, match="position 7 has no block: its entry in the table is -1"):
        slot_mapping_for([1, -1], [3, 7], 4)  # slot −1 would be skipped when written
