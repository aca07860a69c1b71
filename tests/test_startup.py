"""The warm-up runs the steps that take most memory, and the pool's sizes are what was asked for.

Protects the memory budget from a warm-up that leaves out what requests may do later: the longest
prompts, and the sampler's float32 rows for every seat.
"""

from types import SimpleNamespace

import pytest
import torch

from paged import Engine, EngineConfig
from paged.models.decoder import random_decoder
from paged.startup import (
    allocate_cache,
    block_bytes,
    cpu_num_blocks,
    make_runner,
    measure_budget,
    warm_up,
)
from tests.small_models import TINY_QWEN3


class Recorder:
    """Remembers every batch; needs no model."""

    def __init__(self):
        self.batches = []

    def execute(self, batch):
        self.batches.append(([
            end - start for start, end in zip(batch.query_start_loc, batch.query_start_loc[1:])
        ], [request.params for request in batch.requests]))
        return [0] * len(batch.requests)


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
    (first, _), (second, params) = runner.batches
    assert first == prompts
    assert second == [1] * seats and all(p.top_p < 1 and p.logprobs is not None for p in params)
    assert not engine.has_unfinished() and engine.block_pool.num_free() == 64


def test_a_pool_that_cannot_be_is_refused_with_the_numbers():
    decoder = random_decoder(TINY_QWEN3)
    with pytest.raises(
            MemoryError,
            match="a pool of 1000000000 blocks of 16 tokens takes .* GiB.* lower num_blocks"):
        allocate_cache(decoder, 10**9, 16)


def test_graphs_without_room_are_a_sentence(monkeypatch):
    """In the runner of a user's pool, and in the warm-up, which names its own way out."""

    class FullCard:

        def __init__(self, *args):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder, config = random_decoder(TINY_QWEN3), EngineConfig(num_blocks=6, block_size=4,
                                                               max_num_seqs=2)
    monkeypatch.setattr("paged.graph_runner.GraphRunner", FullCard)
    monkeypatch.setattr(
        "paged.startup.allocate_cache", lambda *args, **kwargs: SimpleNamespace(
            data=SimpleNamespace(is_cuda=True, nbytes=2**30, device=torch.device("cpu"))))
    with pytest.raises(
            MemoryError,
            match=r"no room for the graphs of a step beside a pool of 6 blocks \(1.00 GiB\)"):
        make_runner(decoder, config)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    with pytest.raises(
            MemoryError,
            match="no room for a step of 32 tokens: .* Lower max_num_batched_tokens or max_n"):
        measure_budget(decoder, 4, 2, 16, 32, 0.9)


def test_blocks_on_a_cpu_are_no_more_than_could_be_in_use():
    decoder = random_decoder(TINY_QWEN3)
    assert cpu_num_blocks(decoder, 16, max_num_seqs=3, max_model_len=100) == 3 * 7
    assert cpu_num_blocks(decoder, 16, max_num_seqs=10**6,
                          max_model_len=10**6) == 2**30 // block_bytes(decoder, 16)
