"""The block pool against a model that is too simple to be wrong: a Python list and a dictionary of
counts.

Protects: free and used blocks partition the pool, whatever is called in whatever order; a call that
fails changes nothing; blocks are handed out again in the order in which they were freed; a block
leaves the middle of the queue in O(1); fork and copy-on-write; and the traces of the pool of eight,
the seven tokens and the two prompts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged import BlockPool, Trace


def state(pool):
    """Everything a caller can see."""
    return list(pool.ref_cnt), pool.free_queue(), pool.num_free(), len(pool.trace.events)


def refused(pool, error, call, match=None):
    """The call raises, and leaves the pool as it was."""
    before = state(pool)
    with pytest.raises(error, match=match):
        call()
    assert state(pool) == before


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls; `queue`, `counts` and `tables` are what must come out."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, trace=Trace())
        self.handed_out = []
        self.pool.on_allocate = self.handed_out.append
        self.queue = list(range(num_blocks))
        self.counts = [0] * num_blocks
        self.tables = []

    def pick(self, data):
        return data.draw(st.sampled_from(range(len(self.tables))), "table")

    def give_up(self, blocks):
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.queue.append(block)

    def take(self, block):
        if self.counts[block] == 0:
            self.queue.remove(block)
        self.counts[block] += 1

    @rule(data=st.data())
    def allocate(self, data):
        n = data.draw(st.integers(0, self.pool.num_blocks + 1), "n")
        before = state(self.pool)
        blocks = self.pool.allocate(n)
        if n > len(self.queue):
            assert blocks is None and state(self.pool) == before
            return
        assert blocks == self.queue[:n], "blocks come from the head, in order"
        assert self.handed_out[len(self.handed_out) - n:] == blocks
        for block in blocks:
            self.take(block)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_the_end_of_a_table(self, data):
        table = self.tables[self.pick(data)]
        keep = data.draw(st.integers(0, len(table)), "keep")
        tail = table[keep:][::-1]
        del table[keep:]
        self.pool.free(iter(tail))
        self.give_up(tail)
        self.tables = [table for table in self.tables if table]

    @rule(data=st.data())
    def share_any_blocks(self, data):
        """Held or free, from anywhere in the queue, and perhaps the same block twice."""
        any_block = st.integers(0, self.pool.num_blocks - 1)
        blocks = data.draw(st.lists(any_block, min_size=1, max_size=4), "blocks")
        self.pool.share(blocks)
        for block in blocks:
            self.take(block)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.tables[self.pick(data)]
        child = self.pool.fork(parent)
        assert child == parent and child is not parent
        for block in child:
            self.take(block)
        self.tables.append(child)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def copy_on_write(self, data):
        table = data.draw(st.sampled_from([table for table in self.tables if table]), "table")
        index = data.draw(st.integers(0, len(table) - 1), "index")
        source = table[index]
        if self.counts[source] == 1:
            before = state(self.pool)
            assert self.pool.copy_on_write(table, index) is None
            assert state(self.pool) == before and table[index] == source
        elif not self.queue:
            copy = list(table)
            refused(self.pool, MemoryError, lambda: self.pool.copy_on_write(table, index),
                    "a free block")
            assert table == copy
        else:
            destination = self.queue[0]
            assert self.pool.copy_on_write(table, index) == (source, destination)
            assert table[index] == destination
            self.take(destination)
            self.give_up([source])

    @rule(data=st.data())
    def calls_that_must_fail(self, data):
        pool, held = self.pool, [block for table in self.tables for block in table]
        unknown = data.draw(st.sampled_from([-1, pool.num_blocks]), "unknown")
        for call in (pool.free, pool.share, pool.fork):
            refused(pool, ValueError, lambda call=call: call(held + [unknown]), "not in this pool")
        refused(pool, ValueError, lambda: pool.allocate(-1), "cannot allocate -1")
        if self.queue:
            free = data.draw(st.sampled_from(self.queue), "free block")
            refused(pool, ValueError, lambda: pool.free(held + [free]), "already free")
            refused(pool, ValueError, lambda: pool.fork(held + [free]), "already free")
            refused(pool, ValueError, lambda: pool.copy_on_write([free], 0), "already free")
        if held:
            block = data.draw(st.sampled_from(held), "held block")
            times = self.counts[block] + 1
            refused(pool, ValueError, lambda: pool.free([block] * times), f"given {times} times")

    @invariant()
    def pool_and_model_agree(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_queue() == self.queue, "freed longest ago comes first"
        assert self.pool.ref_cnt == self.counts
        assert self.pool.num_free() == len(self.queue)
        assert set(self.queue) == {block for block, count in enumerate(self.counts) if count == 0}
        self.pool.check_integrity(self.tables)
        events = self.pool.trace.events
        assert not events or events[-1]["free"] == len(self.queue)

    def teardown(self):
        """Every reference given back: the pool is whole again."""
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(reversed(table))
            assert sorted(self.pool.free_queue()) == list(range(self.pool.num_blocks))
            self.pool.check_integrity([])


TestAnySequenceOfCalls = PoolMachine.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_pool_of_eight():
    """Allocate 3, allocate 2, free the first, allocate 4."""
    pool = BlockPool(8)
    first = pool.allocate(3)
    assert first == [0, 1, 2] and pool.num_free() == 5
    assert pool.allocate(2) == [3, 4]
    pool.free(first)
    assert pool.allocate(4) == [5, 6, 7, 0]
    assert pool.ref_cnt == [1, 0, 0, 1, 1, 1, 1, 1]


def test_four_score_and_seven():
    """A block is handed out when a token needs it, and not before."""
    pool, block_size = BlockPool(8), 4
    pool.allocate(8)
    pool.free([7, 1, 3])
    tokens = "Four score and seven years ago our".split()
    table = pool.allocate(-(-len(tokens) // block_size))
    assert table == [7, 1]
    filled = [len(tokens[i * block_size:(i + 1) * block_size]) for i in range(len(table))]
    assert filled == [4, 3]
    tokens.append("fathers")
    assert len(
        tokens) == len(table) * block_size and pool.num_free() == 1  # it fills block 1: no call
    tokens.append("brought")
    table += pool.allocate(1)
    assert table == [7, 1, 3] and len(tokens) - 2 * block_size == 1


def test_two_prompts_share_a_block_and_release_it_in_turn():
    """Prompts of 406 and 409 tokens, block size 256, one block in common."""
    pool = BlockPool(2234, trace=Trace())
    a = pool.allocate(2)
    assert (a, pool.num_free()) == ([0, 1], 2232)
    pool.share([a[0]])
    b = [a[0]] + pool.allocate(1)
    assert (b, pool.num_free(), pool.ref_cnt[0]) == ([0, 2], 2231, 2)
    pool.free(reversed(a))
    pool.free(reversed(b))
    released = [(event["block"], event["free"]) for event in pool.trace.select("KV_BLOCK_RELEASE")]
    assert released == [(1, 2232), (2, 2233), (0, 2234)]


def test_a_freed_block_is_reactivated_out_of_the_middle_of_the_queue():
    pool = BlockPool(5, trace=Trace())
    pool.free(pool.allocate(5))
    pool.share([2])
    assert pool.free_queue() == [0, 1, 3, 4]
    pool.share([2, 0])
    assert pool.free_queue() == [1, 3, 4] and pool.ref_cnt == [1, 0, 2, 0, 0]
    assert [event["event"] for event in pool.trace.events[-3:]] == [
        "KV_BLOCK_REACTIVATE", "KV_BLOCK_REUSE", "KV_BLOCK_REACTIVATE"
    ]
    pool.free([2, 2, 0])
    assert pool.free_queue() == [1, 3, 4, 2, 0], "freed last, handed out last"


class CountingList(list):
    """A list that counts how often its items are read or written."""

    touched = 0

    def __getitem__(self, index):
        self.touched += 1
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self.touched += 1
        super().__setitem__(index, value)


@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_taking_a_block_out_of_the_queue_costs_the_same_wherever_it_stands(position):
    costs = set()
    for num_blocks in (10, 10_000):
        pool = BlockPool(num_blocks)
        pool._next, pool._prev = CountingList(pool._next), CountingList(pool._prev)
        block = round(position * (num_blocks - 1))
        pool.share([block])
        out = pool._next.touched + pool._prev.touched
        pool.free([block])
        costs.add((out, pool._next.touched + pool._prev.touched - out))
    assert len(costs) == 1 and sum(costs.pop()) < 12


def test_copy_on_write_of_three_branches_copies_twice():
    """The last holder never pays: when it writes, its count has come down to 1."""
    pool = BlockPool(8, trace=Trace())
    a = pool.allocate(2)
    b, c = pool.fork(a), pool.fork(a)
    assert pool.ref_cnt[:2] == [3, 3] and pool.num_free() == 6
    assert pool.copy_on_write(a, 1) == (1, 2)
    assert pool.copy_on_write(c, -1) == (1, 3)
    assert pool.copy_on_write(b, 1) is None
    assert (a, b, c) == ([0, 2], [0, 1], [0, 3])
    assert pool.ref_cnt[:4] == [3, 1, 1, 1]
    copies = [(event["source"], event["block"]) for event in pool.trace.select("KV_BLOCK_COPY")]
    assert copies == [(1, 2), (1, 3)]
    pool.check_integrity([a, b, c])


@given(prompt=st.integers(1, 40), block_size=st.integers(1, 8), branches=st.integers(1, 5))
def test_a_fork_copies_at_most_the_last_block(prompt, block_size, branches):
    """Each branch appends one token: full blocks of the prompt stay shared, a partial last one is
    copied."""
    pool = BlockPool(64)
    parent = pool.allocate(-(-prompt // block_size))
    tables = [parent] + [pool.fork(parent) for _ in range(branches - 1)]
    copies = []
    for table in tables:
        if prompt % block_size == 0:
            table += pool.allocate(1)
        else:
            copies.append(pool.copy_on_write(table, prompt // block_size))
    copied = [pair for pair in copies if pair is not None]
    assert len(copied) == (branches - 1 if prompt % block_size else 0)
    full = prompt // block_size
    assert all(table[:full] == parent[:full] for table in tables)
    assert len({table[full]
                for table in tables}) == branches, "no two branches write into one block"
    pool.check_integrity(tables)


@pytest.mark.parametrize("num_blocks", [0, -3, 2.0, "8", True, None])
def test_a_pool_needs_at_least_one_block(num_blocks):
    with pytest.raises(ValueError, match="it must be an integer of at least 1"):
        BlockPool(num_blocks)


def test_integrity_is_checked():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="tables hold"):
        pool.check_integrity([table, table])
    pool.ref_cnt[2] = 1
    with pytest.raises(AssertionError, match="free by count"):
        pool.check_integrity()


def test_blocks_from_an_array_leave_ints_in_the_pool():
    import numpy as np
    pool = BlockPool(4)
    pool.allocate(4)
    pool.share(np.array([3]))
    pool.free(np.array([3, 3, 1]))
    table = pool.fork(np.array([0, 2]))
    pool.check_integrity([[0, 2], table])
    assert {type(block) for block in pool.allocate(2) + table} == {int}


def test_free_blocks_in_a_ring_without_a_beginning_are_found():
    pool = BlockPool(3)
    pool._next[2], pool._prev[0] = 0, 2
    with pytest.raises(AssertionError, match="the free queue .* is broken"):
        pool.check_integrity()
