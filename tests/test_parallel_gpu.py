"""Two ranks over NCCL, in graphs, against one card.

Protects what only two GPUs can show: sums inside graphs in each of their ways, ranks that run
ahead, one size of pool for cards with different room, and an end within seconds where a GPU waits.
"""

import os
import signal
import time

import pytest
import torch

from paged import LLM, EngineConfig, SamplingParams
from paged.config import Speedups
from paged.models.config import ModelConfig
from paged.models.decoder import random_decoder
from paged.parallel.ranks import RankLost, join
from paged.parallel.shard import Part
from paged.parallel.sums import Sums, way_of_sum
from paged.startup import cache_spec, make_runner
from tests.small_models import TINY_QWEN3, huggingface_model
from tests.test_parallel import MODELS, PROMPTS, outputs_of, ranked, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2,
                       reason=f"needs two GPUs, and there are {torch.cuda.device_count()}")
]
TOKENS = [1, 8, 16, 17, 32, 128, 256, 2048, 4096]
WIDE = ModelConfig(architecture="llama", vocab_size=1001, hidden_size=4096, intermediate_size=64,
                   num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def ranks():
    ranks = start(2, "cuda")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_cards_draw_what_one_draws(ranks, model, graphs):
    """In float32, alone and in batches, chunks beside decodes, a step ahead."""
    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
                          max_model_len=64)
    requests = [(prompt, SamplingParams(temperature=0.9, seed=4, max_tokens=9))
                for prompt in PROMPTS]
    speedups = Speedups(graphs=graphs)
    decoder = random_decoder(MODELS[model], seed=1, device="cuda")
    want = outputs_of(
        lambda config: make_runner(decoder, cache_spec(decoder, 4), config, speedups=speedups,
                                   use_tqdm=False), config, *requests)
    got = outputs_of(ranked(ranks, model, speedups), config, *requests)
    ranks.send(None)
    assert got == want


def summand(tokens, rank, device):
    generator = torch.Generator().manual_seed(10 * tokens + rank)
    values = torch.randn(tokens, WIDE.hidden_size, generator=generator)
    return values.to(device, torch.bfloat16)


def add_up(ranks, in_graph):
    """The sums of all sizes, each twice in a row, as two products of a layer do it."""
    sums = Sums(Part(WIDE, ranks.rank, ranks.size), 4, torch.bfloat16, ranks.device)
    results = []
    for tokens in TOKENS:
        mine = summand(tokens, ranks.rank, ranks.device)
        x = torch.empty_like(mine)

        def twice(mine=mine, x=x):
            sums.place(x).copy_(mine)
            sums.total(sums.place(x), x)
            scaled = x * 0.5
            sums.place(x).copy_(scaled)
            sums.total(sums.place(x), x)

        twice()
        torch.cuda.synchronize()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                twice()
            x.zero_()
            for _ in range(3):
                graph.replay()
        torch.cuda.synchronize()
        results.append(x)
    return results


def other_adds_up():
    ranks = join(2, torch.device("cuda"), other_adds_up, {})
    with ranks.together():
        while (in_graph := ranks.receive()) is not None:
            add_up(ranks, in_graph)
    ranks.close()


def test_sums_of_every_size_and_way(ranks):
    ranks.close()  # its process group makes room for this one
    assert {way_of_sum(tokens * WIDE.hidden_size * 2, 2)
            for tokens in TOKENS} == {"one-shot", "two-shot", "nccl"}
    mine = join(2, torch.device("cuda"), other_adds_up, {})
    try:
        for in_graph in (False, True):
            mine.send(in_graph)
            with mine.together():
                results = add_up(mine, in_graph)
            for tokens, x in zip(TOKENS, results):
                want = sum(summand(tokens, rank, x.device).float() for rank in range(2))
                torch.testing.assert_close(x.float(), want, rtol=2e-2, atol=2e-2)
    finally:
        mine.close()


def test_an_llm_on_two_cards_until_one_is_killed(tmp_path):
    huggingface_model(TINY_QWEN3).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12)
    sizes = dict(device="cuda", dtype="float32", block_size=16, max_num_seqs=4,
                 gpu_memory_utilization=0.3, use_tqdm=False)
    with LLM(str(tmp_path), **sizes) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        blocks = llm.engine.config.num_blocks
    with LLM(str(tmp_path), tensor_parallel_size=2, **sizes) as llm:
        assert llm.runner.use_graphs and llm.runner.runs_ahead
        assert llm.engine.config.num_blocks > 1.5 * blocks  # half of a block's bytes on each card
        assert [o.outputs[0].token_ids
                for o in llm.generate(PROMPTS, params, use_tqdm=False)] == want
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(llm.ranks._processes[1].pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 of 2 was ended by SIGKILL"):
            for _ in stream:
                pass
        assert time.monotonic() - begin < 30
