"""Protects the exercises: solutions pass, starters and wrong answers fail, and agree with the
package.

Every exercise is held to its own rules (`check`), and its solution to the package where both do the
same.
"""

import random
import sys
import types

import pytest

from practice import sandbox
from practice.catalog import load_exercises
from practice.check import faults_of
from practice.wrong import wrong_answers

EXERCISES = load_exercises()
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


@pytest.mark.parametrize("name", BY_NAME)
def test_check(name):
    """The solution passes; starter and wrong answers run and fail, each wrong answer for the reason
    it is there; three hints; examples that run."""
    if why_not := sandbox.why_not(BY_NAME[name].kind):
        pytest.skip(why_not)
    assert faults_of(BY_NAME[name]) == []


def test_there_are_enough_in_order():
    assert len(EXERCISES) >= 24
    assert [exercise.number for exercise in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    assert len(BY_NAME) == len(EXERCISES)
    assert [exercise.kind for exercise in EXERCISES].count("python") >= 19


@pytest.mark.parametrize("name", BY_NAME)
def test_says_what_it_is(name):
    """Wrong answers say what is wrong with them, and nothing gives an answer away through the
    package."""
    exercise = BY_NAME[name]
    assert all(len(answer.mistake) > 15 for answer in wrong_answers(exercise))
    assert "paged." not in exercise.tests and "import paged" not in exercise.tests
    assert all(len(hint) > 40 for hint in exercise.hints) and len(exercise.explanation) > 200


def solution(name):
    """The solution of an exercise, as a module."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(BY_NAME[name].solution, f"{name}.py", "exec"), module.__dict__)
    return module


def test_solutions_agree_with_the_package_on_numbers():
    from paged import memory

    answer = solution("projections")
    for context, steps in ((100, 50), (1, 1), (7, 0), (0, 9)):
        for name in ("projections_without_cache", "projections_with_cache"):
            assert getattr(answer, name)(context, steps) == getattr(memory, name)(context, steps)
    answer = solution("kv_bytes")
    assert answer.kv_bytes_per_token(28, 8, 128, 2) == memory.kv_bytes_per_token(
        28, 8, 128, "bfloat16")
    for context, block_size in ((3000, 16), (1, 16), (4096, 256)):
        assert answer.concurrent_requests(
            55 * memory.GiB, 57344, context, block_size) == (memory.concurrent_requests(
                55 * memory.GiB, 57344, context, block_size=block_size))
    answer, requests = solution("utilization"), memory.sample_requests()
    assert answer.utilization_reserved(requests, 4096) == memory.utilization_reserved(
        requests, 4096)
    for block_size in (1, 16, 64, 256):
        expected = memory.utilization_paged(requests, block_size)
        assert answer.utilization_paged(requests, block_size) == expected
    answer = solution("memory_budget")
    numbers = [
        95.085 * memory.GiB, 0.9, 1.66 * memory.GiB, 1.599 * memory.GiB, 1.16 * memory.GiB, 29360128
    ]
    assert answer.num_blocks(*numbers) == memory.num_blocks_in_budget(*numbers)


@pytest.mark.parametrize("name", ["block_pool", "copy_on_write"])
def test_block_pool_agrees_with_the_package(name):
    """The exercise's pool and the package's give the same answers, errors included, in random
    walks."""
    from paged import BlockPool

    def outcome(call, *arguments):
        try:
            return call(*arguments)
        except (ValueError, MemoryError) as error:
            return type(error)

    rng = random.Random(0)
    for _ in range(30):
        size = rng.randint(1, 6)
        pools, tables = (solution(name).BlockPool(size), BlockPool(size)), ([], [])
        for _ in range(60):
            methods = ["allocate", "free", "fork", "copy_on_write"]
            method = rng.choice(methods[:2] if name == "block_pool" else methods)
            if method == "allocate":
                count = rng.randint(0, 3)
                got = [pool.allocate(count) for pool in pools]
                for table, blocks in zip(tables, got):
                    if blocks:
                        table.append(blocks)
            elif method == "free" and tables[0] and rng.random() < 0.7:
                index = rng.randrange(len(tables[0]))
                got = [pool.free(table.pop(index)[::-1]) for pool, table in zip(pools, tables)]
            elif method == "free":
                blocks = [rng.randint(-1, size) for _ in range(2)]
                held = [block for table in tables[0] for block in table]
                if all(held.count(block) >= blocks.count(block) for block in blocks):
                    continue  # it would free what a table still names
                got = [outcome(pool.free, list(blocks)) for pool in pools]
            elif tables[0]:
                index = rng.randrange(len(tables[0]))
                if method == "fork":
                    got = [pool.fork(table[index]) for pool, table in zip(pools, tables)]
                    for table, blocks in zip(tables, got):
                        table.append(blocks)
                else:
                    at = rng.randrange(len(tables[0][index]))
                    got = [
                        outcome(pool.copy_on_write, table[index], at)
                        for pool, table in zip(pools, tables)
                    ]
            else:
                continue
            assert got[0] == got[1] and tables[0] == tables[1], method
            assert pools[0].ref_cnt == pools[1].ref_cnt and pools[0].num_free(
            ) == pools[1].num_free()


def test_other_solutions_agree_with_the_package():
    import torch

    from paged import PagedKVCache, paged_attention, prefix_cache, slot_mapping_for
    from practice import perf

    answer = solution("slots")
    for block_size in (1, 3, 16):
        assert answer.slot_mapping_for([5, 0, 7], range(block_size * 3),
                                       block_size) == (slot_mapping_for([5, 0, 7],
                                                                        range(block_size * 3),
                                                                        block_size))
    answer = solution("chained_hash")
    for parent in (None, 0, 2**64 - 1):
        assert answer.chained_hash(parent, [1, 151935]) == prefix_cache.sha256_chain(
            parent, [1, 151935])

    kv = PagedKVCache(1, 8, 4, 2, 16)
    k, v = torch.randn(2, 20, 2, 16)
    slots, tables = [*range(12, 24), *range(0, 7), -1], [[3, 4, 5], [0, 1]]
    kv.write(0, slots, k, v)
    answer = solution("write_gather")
    caches = torch.zeros_like(kv.k[0]), torch.zeros_like(kv.v[0])
    answer.write(*caches, slots, k, v)
    for got, expected in zip(answer.gather(*caches, tables[1], 7), kv.gather(0, tables[1], 7)):
        assert torch.equal(got, expected)
    q = torch.randn(4, 4, 16)
    arguments = (tables, [12, 7], [0, 3, 4], 0.25)
    got = solution("paged_attention").paged_attention(q, kv.k[0], kv.v[0], *arguments)
    assert torch.allclose(got, paged_attention(q, kv, 0, *arguments), atol=1e-5)
    assert perf.SHAPES.keys() <= BY_NAME.keys()
