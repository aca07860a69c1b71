"""The runner with fused operations against the same with plain ones: the same tokens, whatever
shares the batch and however it is scheduled.

Protects the GPU path's bookkeeping: seats, patched block tables, tokens that stay on the GPU,
padding up to captured sizes, running one step ahead. Without a GPU the kernels run in Triton's
interpreter and "graphs" run again.
"""

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.config import Speedups
from paged.fp8 import FP8
from paged.models.config import ModelConfig
from paged.models.decoder import random_decoder
from paged.runner import ModelRunner
from tests.caches import nan_cache

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMALL = ModelConfig(architecture="qwen3", vocab_size=61, hidden_size=16, intermediate_size=24,
                    num_layers=2 if CUDA else 1, num_heads=4, num_kv_heads=2, head_dim=16,
                    qk_norm=True, tie_word_embeddings=True)


@pytest.fixture
def decoder():
    return random_decoder(SMALL, seed=3, device=DEVICE)


def engine_with(fused, decoder, num_blocks=24, block_size=4, max_num_seqs=4, budget=32,
                use_graphs=False, backend=None, persistent=False, cache=torch.float32, **config):
    """An engine on a cache full of NaN: plain and in step, or fused and running ahead."""
    kv = nan_cache(SMALL.num_layers, num_blocks, block_size, SMALL.num_kv_heads, SMALL.head_dim,
                   cache, DEVICE)
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=budget, max_model_len=64, **config)
    host_kv = kv.spec.allocate(num_blocks) if config.preemption == "swap" else None
    runner = ModelRunner(
        decoder, kv, config, backend or ("triton" if fused else "reference"), host_kv,
        Speedups(graphs=use_graphs, fused=fused, run_ahead=fused, persistent=persistent))
    if use_graphs:
        runner.capture(use_tqdm=False)
    return Engine(config, runner)


def run(engine, requests):
    """Add the requests one step apart and run to the end; returns the tokens of every
    completion."""
    outputs, waiting, ids = {}, list(requests), []
    while waiting or engine.has_unfinished():
        if waiting:
            ids.append(engine.add_request(*waiting.pop(0)))
        for output in engine.step():
            outputs[output.request_id] = output
        engine.check_integrity()
    assert engine.block_pool.num_free() == engine.config.num_blocks
    return [[c.token_ids for c in outputs[i].outputs] for i in ids]


def greedy(n, **kwargs):
    return SamplingParams(temperature=0, max_tokens=n, **kwargs)


MIX = [([1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(6)), ([1, 2, 3, 4, 5, 6, 7, 8, 30], greedy(9)),
       ([7], greedy(1)), ([9, 8, 7, 6, 5], greedy(4)), ([1, 2, 3, 4, 5], greedy(5)),
       (list(range(20)), greedy(3))]


@pytest.mark.parametrize("use_graphs, cache", [(True, torch.float32), (False, torch.float32),
                                               (False, FP8)])
def test_same_tokens_as_the_plain_runner(decoder, use_graphs, cache):
    want = run(engine_with(False, decoder, cache=cache), MIX)
    assert run(engine_with(True, decoder, use_graphs=use_graphs, cache=cache), MIX) == want


def test_same_tokens_with_all_layers_in_one_kernel(decoder):
    want = run(engine_with(False, decoder, cache=FP8), MIX[:4])
    engine = engine_with(True, decoder, use_graphs=True, cache=FP8, persistent=True)
    assert run(engine, MIX[:4]) == want


def test_one_kernel_is_refused_with_the_reason(decoder):
    with pytest.raises(ValueError, match="persistent kernel, and .*backend 'reference'"):
        engine_with(True, decoder, backend="reference", persistent=True)
    with pytest.raises(ValueError, match="persistent kernel, and .*fused is False"):
        engine_with(False, decoder, persistent=True)


@pytest.mark.parametrize("cache", [torch.float32, FP8])
def test_chunks_and_a_tight_pool(decoder, cache):
    tight = dict(num_blocks=11, budget=5, cache=cache)
    want = run(engine_with(False, decoder, **tight), MIX[:4])
    for preemption in ("recompute", "swap"):
        engine = engine_with(True, decoder, preemption=preemption, **tight)
        assert run(engine, MIX[:4]) == want


def test_forks_filters_and_penalties(decoder):
    requests = [([5, 4, 3, 2, 1, 0], SamplingParams(n=3, max_tokens=5, seed=1, top_k=1)), MIX[3],
                ([5, 4, 3, 2], greedy(4, logprobs=2)), ([5, 4, 3], greedy(
                    4, repetition_penalty=1.5))]
    want = run(engine_with(False, decoder, max_num_seqs=6), requests)
    assert run(engine_with(True, decoder, max_num_seqs=6), requests) == want


def test_a_seeded_draw_does_not_depend_on_company(decoder):
    lone = [([3, 1, 4, 1, 5], SamplingParams(temperature=1.0, max_tokens=6, seed=-2**70))]
    alone = run(engine_with(True, decoder), lone)
    among = run(engine_with(True, decoder), MIX[:2] + lone)
    assert among[2] == alone[0]


def test_seats_are_taken_back(decoder):
    engine = engine_with(True, decoder, max_num_seqs=2)
    want = [run(engine_with(False, decoder, max_num_seqs=2), [request])[0] for request in MIX[:4]]
    assert [run(engine, [request])[0] for request in MIX[:4]] == want


@pytest.mark.gpu
def test_every_batch_size_with_graphs(decoder):
    shape = dict(max_num_seqs=40, num_blocks=400, budget=256)
    engine = engine_with(True, decoder, use_graphs=True, **shape)
    plain = engine_with(False, decoder, **shape)
    for size in range(1, 41):
        requests = [([size, i, i + 1], greedy(3 + i % 4)) for i in range(size)]
        assert run(engine, requests) == run(plain, requests), f"batch of {size}"


def test_a_seat_is_taken_only_when_what_belongs_to_it_has_arrived(decoder):
    """Another request's temperature and seed would stay in the seat of one whose copy failed."""
    engine = engine_with(True, decoder, max_num_seqs=1)
    prompt = ([1, 2, 3, 4, 5], greedy(6))
    want = run(engine, [prompt])
    for failing in range(3):
        run(engine,
            [([4, 5, 6], SamplingParams(temperature=1.5, seed=99, max_tokens=2, ignore_eos=True))])
        send, calls = engine.runner.seats.send, []

        def fails_once(*values, send=send, calls=calls, failing=failing):
            calls.append(values)
            if len(calls) == failing + 1:
                raise RuntimeError("no memory for a copy")
            return send(*values)

        engine.runner.seats.send = fails_once
        request_id = engine.add_request(*prompt)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.step()
        output = engine.output(request_id)
        while engine.has_unfinished():
            engine.step()
        assert [output.outputs[0].token_ids] == want[0]
        engine.runner.seats.send = send


def test_seats_come_back_when_a_reset_starts_afresh(decoder, monkeypatch):
    engine = engine_with(True, decoder, max_num_seqs=1)
    want = run(engine, [([1, 2, 3], greedy(3))])
    engine.add_request([1, 2, 3], greedy(8))
    engine.step()
    monkeypatch.setattr(engine.scheduler, "finish", lambda request: 1 / 0)
    engine.reset()
    assert run(engine, [([1, 2, 3], greedy(3))]) == want


def test_an_endless_temperature_draws_evenly(decoder):
    engine = engine_with(True, decoder)
    hot = [([1, 2], SamplingParams(temperature=1e300, seed=seed, max_tokens=1, ignore_eos=True))
           for seed in range(12)]
    assert len({tokens[0][0] for tokens in run(engine, hot)}) > 6


def test_decode_sizes_end_where_steps_end(decoder):
    runner = engine_with(True, decoder, max_num_seqs=40, budget=12).runner
    assert (runner.decode_sizes, runner.mixed_sizes) == ([1, 2, 4, 8, 12], [16])


@pytest.mark.skipif(CUDA, reason="a GPU runs them")
def test_fused_operations_that_cannot_run_are_refused_with_the_reason(decoder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="fused operations, and .*TRITON_INTERPRET=1"):
        engine_with(True, decoder, backend="reference")


@pytest.mark.parametrize("fused", [False, True])
def test_a_damaged_weight_is_a_sentence_and_no_token(decoder, fused):
    decoder.norm[3] = float("nan")
    engine = engine_with(fused, decoder)
    engine.add_request([1, 2, 3, 4, 5], greedy(3))
    while engine.has_unfinished():
        (output,) = engine.step() or [None]
    completion = output.outputs[0]
    assert (completion.token_ids, completion.finish_reason) == ([], "error")
    assert "NaN or infinity: the weights are damaged" in completion.error


def test_a_step_in_which_blocks_move_and_nothing_is_computed(decoder):
    """The first request has its token on its way when the second one needs a block for its last:
    it goes out, and the step has no row."""
    requests = [([7], greedy(1)), ([1, 2], greedy(2))]
    engine = engine_with(True, decoder, num_blocks=3, block_size=1, preemption="swap")
    launch, empty = engine.launch, []

    def record(batch):
        handle = launch(batch)
        if not batch.seats:
            empty.append(bool(batch.swap_out))
            assert handle is None, "there was nothing to run"
        return handle

    engine.launch = record
    ids = [engine.add_request(*request) for request in requests]
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    assert any(empty)
    got = [[outputs[name].outputs[0].token_ids] for name in ids]
    assert got == run(engine_with(False, decoder), requests)
