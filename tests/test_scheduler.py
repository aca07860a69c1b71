"""Scheduling: one token budget, seats, chunks, order, and preemption by both policies.

Every test runs on the oracle, so whatever a test is about, every read and every output is checked
as well. The smallest inputs that broke public engines stand here by class: budget, chunk length,
residents, hits that are themselves the free blocks, preemption at block boundaries.
"""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged import SamplingParams
from paged.lab.oracle import truth
from paged.request import Status
from tests.engines import generate, make_engine, run

POLICIES = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 250 for i in range(length)]


def add(engine, tokens, max_tokens=1, **kwargs):
    return engine.add_request(tokens, SamplingParams(max_tokens=max_tokens), **kwargs)


# ── the budget ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("budget, chunks", [(1, [1] * 9), (3, [3, 3, 3]), (4, [4, 4, 1]),
                                            (5, [5, 4]), (9, [9]), (64, [9])])
def test_prompt_is_cut_to_the_budget(budget, chunks):
    engine = make_engine(max_num_batched_tokens=budget)
    generate(engine, (prompt(9), 1))
    assert [batch.num_tokens for batch in engine.runner.batches] == [[chunk] for chunk in chunks]


def test_chunk_sees_the_keys_before_it_and_no_more():
    engine = make_engine(max_num_batched_tokens=4)
    generate(engine, (prompt(12), 1))
    assert [batch.seq_lens for batch in engine.runner.batches] == [[4], [8], [12]]


def test_leftover_budget_goes_to_the_next_request():
    engine = make_engine(max_num_batched_tokens=10)
    generate(engine, (prompt(7), 1), (prompt(7, 50), 1), (prompt(4, 100), 1))
    assert [batch.num_tokens for batch in engine.runner.batches] == [[7, 3], [4, 4]]


def test_several_chunks_share_a_step():
    engine = make_engine(num_blocks=20, max_num_batched_tokens=10)
    for first in (0, 50, 100):
        add(engine, prompt(8, first))
    engine.step()
    engine.step()
    assert engine.runner.batches[1].num_tokens == [6, 4]
    run(engine)


def test_decodes_do_not_wait_for_prefills():
    engine = make_engine(num_blocks=30, max_num_batched_tokens=4)
    add(engine, prompt(3), 10)
    engine.step()
    add(engine, prompt(27, 50), 1)
    for _ in range(9):
        engine.step()
        assert engine.runner.batches[-1].request_ids[
            0] == "0"  # a token for the running one, every step
        assert engine.runner.batches[-1].num_tokens == [1, 3]  # and a chunk in what it leaves
    assert run(engine) == {}


def test_blocks_of_a_long_prompt_are_taken_as_its_chunks_come():
    engine = make_engine(num_blocks=8, max_num_batched_tokens=8)
    add(engine, prompt(30))
    free = []
    while engine.has_unfinished():
        engine.step()
        free.append(engine.block_pool.num_free())
    assert free == [6, 4, 2, 8]


def test_two_half_admitted_prompts_do_not_lock_each_other_out():
    engine = make_engine(num_blocks=8, block_size=2, max_num_batched_tokens=6)
    for first in (0, 50, 100):
        add(engine, prompt(14, first), 3)  # each needs the whole pool
    run(engine, max_steps=40)
    assert engine.scheduler.num_preemptions == 0


def test_a_prompt_is_let_in_when_all_of_it_fits_and_not_for_its_first_chunk():
    """Else it fills what is left, is put out before its last chunk, and is computed again and
    again."""
    engine = make_engine(num_blocks=10, block_size=2, max_num_batched_tokens=5,
                         enable_prefix_caching=False)
    add(engine, prompt(4), 12)
    engine.step()
    engine.step()
    assert engine.block_pool.num_free() == 7
    add(engine, prompt(15, 50), 2)  # two chunks would fit, and then no more
    run(engine)
    assert engine.runner.num_computed_tokens == 4 + 11 + 15 + 1


# ── seats and order ───────────────────────────────────────────────────────────────────────────────


def test_seats_bound_the_requests_that_hold_blocks():
    engine = make_engine(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=3)
    for first in range(0, 200, 40):
        add(engine, prompt(6, first), 3)
    while engine.has_unfinished():
        engine.step()
        assert sum(bool(request.block_table) for request in engine.scheduler.running) <= 2
        assert len(engine.scheduler.running) <= 2


def test_a_request_with_copies_waits_for_all_its_seats():
    engine = make_engine(num_blocks=40, max_num_seqs=3)
    add(engine, prompt(3), 2)
    engine.add_request(prompt(3, 50), SamplingParams(n=3, max_tokens=2))
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["0"]
    run(engine)


def test_requests_are_admitted_in_the_order_of_arrival():
    engine = make_engine(num_blocks=6, block_size=4, max_num_seqs=8)
    add(engine, prompt(12), 4)
    add(engine, prompt(20, 50), 1)  # does not fit beside the first
    add(engine, prompt(2, 100), 1)  # would fit, but came later
    engine.step()
    assert engine.runner.batches[0].request_ids == ["0"]
    run(engine)
    first_seen = list(
        dict.fromkeys(name for batch in engine.runner.batches for name in batch.request_ids))
    assert first_seen == ["0", "1", "2"]


@given(st.data())
def test_every_step_advances_the_oldest_request(data):
    """The bound on steps: as many as there are tokens, since the oldest request advances in
    each."""
    block_size, num_blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    capacity = block_size * num_blocks
    engine = make_engine(num_blocks, block_size, data.draw(st.integers(1, 4)),
                         data.draw(st.integers(1, 9)), preemption=data.draw(
                             st.sampled_from(["recompute", "swap"])))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=5))
    total = 0
    for i, length in enumerate(lengths):
        max_tokens = data.draw(st.integers(1, capacity - length + 1))
        add(engine, prompt(length, 40 * i), max_tokens)
        total += length + max_tokens
    run(engine, max_steps=total)
    scheduled = engine.runner.batches
    for before, after in zip(scheduled, scheduled[1:]):  # the oldest is in the next step, or done
        if before.request_ids[0] != after.request_ids[0]:
            assert int(before.request_ids[0]) < int(after.request_ids[0])


# ── blocks run out ────────────────────────────────────────────────────────────────────────────────


def test_hits_that_are_the_only_free_blocks_are_not_handed_out_as_well():
    engine = make_engine(num_blocks=4, block_size=2)
    generate(engine, (prompt(6), 1))  # leaves three cached blocks, all free
    add(engine, prompt(2, 50), 6)
    engine.step()  # takes the one block that holds nothing
    add(engine, prompt(7), 1)  # three hits, and no fourth block
    free, counts = engine.block_pool.free_queue(), list(engine.block_pool.ref_cnt)
    assert engine.scheduler._admit(engine.scheduler.waiting[0]) is False
    assert (engine.block_pool.free_queue(), engine.block_pool.ref_cnt) == (free, counts)
    run(engine)


@POLICIES
@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
def test_preempted_at_any_place_in_a_block(preemption, length):
    """The younger of two is put out when it has length mod 4 = 0, 1, 2, 3 tokens, and comes
    back."""
    engine = make_engine(num_blocks=5, block_size=4, preemption=preemption)
    generate(engine, (prompt(8), 9), (prompt(length, 50), 8))
    assert engine.scheduler.num_preemptions > 0


@POLICIES
def test_a_request_may_preempt_itself(preemption):
    engine = make_engine(num_blocks=4, block_size=2, preemption=preemption)
    add(engine, prompt(3), 4)
    add(engine, prompt(4, 50), 4)
    engine.step()  # both prompts fill all four blocks
    assert engine.block_pool.num_free() == 0
    engine.step()
    assert engine.runner.batches[1].request_ids == ["0"
                                                    ]  # the younger one needs a block: its own go
    assert engine.scheduler.waiting[0].status is (Status.SWAPPED
                                                  if preemption == "swap" else Status.WAITING)
    outputs = run(engine)
    assert outputs["1"].metrics.num_preemptions == 1
    assert outputs["1"].outputs[0].token_ids == truth(prompt(4, 50), 4)


@POLICIES
def test_preempted_twice_and_after_outputs_exist(preemption):
    engine = make_engine(num_blocks=8, block_size=2, preemption=preemption)
    add(engine, prompt(2), 15)
    add(engine, prompt(2, 50), 5)  # makes room for the third when it ends
    add(engine, prompt(2, 100), 12)
    output = run(engine)["2"]
    assert output.metrics.num_preemptions == 2
    assert output.outputs[0].token_ids == truth(prompt(2, 100), 12)


@POLICIES
def test_several_victims_keep_their_order(preemption):
    engine = make_engine(num_blocks=8, block_size=2, max_num_batched_tokens=16,
                         preemption=preemption)
    for first in (0, 50, 100, 150):
        add(engine, prompt(4, first), 8)
    while engine.has_unfinished():
        engine.step()
        queue = engine.scheduler.running + engine.scheduler.waiting
        assert [int(request.request_id) for request in queue] == sorted(
            int(r.request_id) for r in queue)
    assert engine.scheduler.num_preemptions >= 3


def test_swapping_moves_blocks_and_computes_nothing_again():
    engine = make_engine(num_blocks=5, block_size=4, preemption="swap", enable_prefix_caching=False)
    generate(engine, (prompt(8), 9), (prompt(7, 50), 8))
    computed = sum(sum(batch.num_tokens) for batch in engine.runner.batches)
    assert computed == 8 + 9 - 1 + 7 + 8 - 1  # every token but the last of each, once
    assert sum(len(batch.swap_in) for batch in engine.runner.batches) == 2


def test_recomputing_computes_the_outputs_again_as_part_of_the_prompt():
    engine = make_engine(num_blocks=5, block_size=4, preemption="recompute",
                         enable_prefix_caching=False)
    generate(engine, (prompt(8), 9), (prompt(7, 50), 8))
    computed = sum(sum(batch.num_tokens) for batch in engine.runner.batches)
    assert computed > 8 + 9 - 1 + 7 + 8 - 1
    assert not any(batch.swap_out or batch.swap_in for batch in engine.runner.batches)


@POLICIES
@pytest.mark.parametrize("num_blocks, block_size", [(6, 1), (7, 1), (6, 2)])
def test_who_comes_back_takes_of_the_budget_as_well(preemption, num_blocks, block_size):
    engine = make_engine(num_blocks, block_size, max_num_batched_tokens=3, preemption=preemption,
                         enable_prefix_caching=False)
    generate(engine, (prompt(2), 4), (prompt(3, 50), 4), (prompt(1, 90), 5), (prompt(3, 70), 3))
    assert engine.scheduler.num_preemptions > 0
    assert max(sum(batch.num_tokens) for batch in engine.runner.batches) == 3


def test_without_room_on_the_host_a_swapped_request_recomputes():
    engine = make_engine(num_blocks=5, block_size=4, preemption="swap", num_host_blocks=1)
    generate(engine, (prompt(8), 9), (prompt(7, 50), 8))
    assert engine.scheduler.num_preemptions > 0
    assert not any(batch.swap_in for batch in engine.runner.batches)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nobody_is_put_out_who_has_a_place_in_the_step(preemption):
    """A chunk or a copy that needs blocks puts out the youngest, who is looked at last."""
    engine = make_engine(num_blocks=6, block_size=2, max_num_batched_tokens=4,
                         enable_prefix_caching=False, preemption=preemption)
    preempt, victims = engine.scheduler._preempt, []

    def record(victim):
        victims.append((victim, dict(engine.scheduler.scheduled)))
        preempt(victim)

    engine.scheduler._preempt = record
    engine.add_request(prompt(3), SamplingParams(max_tokens=7, n=3))
    for length, max_tokens in ((4, 2), (1, 8), (7, 3)):
        engine.add_request(prompt(length, 50), SamplingParams(max_tokens=max_tokens))
    run(engine)
    assert len(victims) > 3
    for victim, scheduled in victims:
        assert victim not in scheduled
        assert all(request.order < victim.order for request in scheduled)


# ── copies ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length, copies", [(1, 2), (3, 2), (4, 2), (5, 2), (8, 2)])
def test_copies_happen_only_when_a_shared_block_is_about_to_be_written(length, copies):
    """Three completions of one prompt: each but the last to write copies the one block it writes
    to."""
    engine = make_engine(num_blocks=20)
    engine.add_request(prompt(length), SamplingParams(n=3, max_tokens=5))
    outputs = run(engine)
    assert sum(len(batch.block_copies) for batch in engine.runner.batches) == copies
    for index, completion in enumerate(outputs["0"].outputs):
        assert completion.token_ids == truth(prompt(length), 5, index)


def test_the_prompt_of_many_completions_is_computed_once():
    engine = make_engine(num_blocks=20, enable_prefix_caching=False)
    engine.add_request(prompt(11), SamplingParams(n=4, max_tokens=3))
    run(engine)
    # The prompt, its last token again for the three that fork, and two more tokens of each
    # completion.
    assert engine.runner.num_computed_tokens == 11 + 3 + 4 * 2


# ── cost ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_prompt_that_waits_is_matched_again_only_when_something_changed(prefix_cache):
    engine = make_engine(num_blocks=12, block_size=2, max_num_batched_tokens=40,
                         prefix_cache=prefix_cache)
    cache, matched = engine.prefix_cache, []
    match = cache.match
    cache.match = lambda tokens, salt=None: (matched.append(len(tokens)), match(tokens, salt))[1]
    add(engine, prompt(13), 9)  # 7 blocks, up to 11
    engine.step()
    add(engine,
        prompt(13) + truth(prompt(13), 1) + prompt(9, 50), 1)  # the same 6 blocks, and 6 more
    engine.step()
    engine.step()
    engine.step()
    assert matched == [13, 23, 23]  # once more: a seventh block was cached
    run(engine)
    assert matched[3:] and len(matched) < 8


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_step_does_the_same_work_at_any_context(prefix_cache):
    """Counts function calls, which unlike times are the same on every machine."""
    calls = []
    for context in (20, 2000):
        engine = make_engine(num_blocks=4200, block_size=4, max_num_batched_tokens=20_000,
                             max_model_len=3000, prefix_cache=prefix_cache)
        engine.launch = lambda batch: [7] * len(batch.request_ids)
        for first in range(8):
            add(engine, [first] * context, 30)
        engine.step()
        number = 0

        def count(frame, event, arg):
            nonlocal number
            inside = frame.f_globals.get("__name__", "").startswith("paged.")
            number += inside and event in ("call", "c_call")

        sys.setprofile(count)
        for _ in range(8):  # in which each request fills two blocks
            engine.step()
        sys.setprofile(None)
        calls.append(number)
    assert calls[0] == calls[1]
