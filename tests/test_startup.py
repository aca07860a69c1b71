"""The warm-up runs the steps that take most memory, and the pool's sizes are what was asked for.

Protects the memory budget from a warm-up that leaves out what requests may do later: the longest
prompts, and the sampler's float32 rows for every seat.
"""

from types import SimpleNamespace

import pytest
import torch

from paged import Engine, EngineConfig
from paged.fp8 import FP8
from paged.kv_cache import CacheSpec
from paged.models.decoder import random_decoder
from paged.sampling import TOP_P
from paged.startup import cache_spec, cpu_num_blocks, make_runner, measure_budget, warm_up
from tests.small_models import TINY_QWEN3


class Recorder:
    """Remembers every batch; needs no model."""

    def __init__(self):
        self.batches = []

    def execute(self, batch):
        self.batches.append(([
            end - start for start, end in zip(batch.query_start_loc, batch.query_start_loc[1:])
        ], [new.numbers for new in batch.newcomers], dict(batch.num_logprobs)))
        return [0] * len(batch.request_ids)


@pytest.mark.parametrize("seats, longest, budget, prompts", [(4, 16, 32, [16, 16]),
                                                             (1, 16, 32, [16]), (4, 64, 32, [32]),
                                                             (3, 16, 50, [16, 16, 16])])
def test_warm_up_runs_the_largest_steps(seats, longest, budget, prompts):
    runner = Recorder()
    engine = Engine(
        EngineConfig(num_blocks=64, block_size=4, max_num_seqs=seats, max_num_batched_tokens=budget,
                     max_model_len=longest, enable_prefix_caching=False), runner)
    done = []
    warm_up(engine, lambda: done.append(len(runner.batches)))
    assert done == [1, 2]
    (first, *_), (second, numbers, logprobs) = runner.batches
    assert first == prompts
    assert second == [1] * seats and set(logprobs) == set(range(seats))
    assert len(numbers) == seats and all(columns[TOP_P] < 1 for columns in numbers)
    assert not engine.has_unfinished() and engine.block_pool.num_free() == 64


def test_a_pool_that_cannot_be_is_refused_with_the_numbers():
    spec = cache_spec(random_decoder(TINY_QWEN3), 16)
    with pytest.raises(
            MemoryError,
            match="a pool of 1000000000 blocks of 16 tokens takes .* GiB.* lower num_blocks"):
        spec.allocate(10**9)


def test_the_caches_dtype_need_not_be_the_models():
    decoder = random_decoder(TINY_QWEN3)
    assert cache_spec(decoder, 4).dtype == torch.float32
    assert cache_spec(decoder, 4, "bfloat16").block_bytes * 2 == cache_spec(decoder, 4).block_bytes
    small = cache_spec(decoder, 4, "fp8")  # 2 heads of 14 numbers and a scale; K, V and 3 layers
    assert small.dtype == FP8 and small.block_bytes == 2 * 3 * 4 * 2 * (14 + 4)
    assert small.allocate(3).data.nbytes == 3 * small.block_bytes
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int3': choose auto, float32"):
        cache_spec(decoder, 4, "int3")


def test_graphs_without_room_are_a_sentence(monkeypatch):
    """In the runner of a user's pool, and in the warm-up, which names its own way out."""

    class FullCard:

        def __init__(self, *args):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder, config = random_decoder(TINY_QWEN3), EngineConfig(
        num_blocks=6, block_size=4, max_num_seqs=2, max_model_len=16, max_num_batched_tokens=32)
    monkeypatch.setattr("paged.startup.ModelRunner", FullCard)
    monkeypatch.setattr(
        CacheSpec, "allocate", lambda *args: SimpleNamespace(data=SimpleNamespace(
            nbytes=2**30, device=torch.device("cpu"))))
    spec = cache_spec(decoder, 4)
    with pytest.raises(
            MemoryError,
            match=r"no room for the graphs of a step beside a pool of 6 blocks \(1.00 GiB\)"):
        make_runner(decoder, spec, config)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    with pytest.raises(
            MemoryError,
            match="no room for a step of 32 tokens: .* Lower max_num_batched_tokens or max_n"):
        measure_budget(decoder, spec, config, 0.9)


def test_blocks_on_a_cpu_are_no_more_than_could_be_in_use():
    spec = cache_spec(random_decoder(TINY_QWEN3), 16)
    few = EngineConfig(num_blocks=1, max_num_seqs=3, max_model_len=100)
    assert cpu_num_blocks(spec, few) == 3 * 7
    many = EngineConfig(num_blocks=1, max_num_seqs=10**6, max_model_len=10**6)
    assert cpu_num_blocks(spec, many) == 2**30 // spec.block_bytes
