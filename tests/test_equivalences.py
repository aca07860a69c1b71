"""How a request is served never shows in what it gets, on small float32 models: tokens equal,
logits to 1e-4.

Cold or warm, whole or in chunks, alone or batched, preempted by either policy or not, n samples or
n requests, any block size, either prefix cache: always what a model that sees the whole sequence
    would say.
"""

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.fp8 import FP8
from paged.models.decoder import random_decoder
from paged.runner import ModelRunner
from paged.sampling import BeamSearchParams
from tests.beams import brute_force
from tests.caches import kept, nan_cache
from tests.engines import run
from tests.small_models import TINY_MODELS, logits_of

DECODERS = {name: random_decoder(config, seed=1) for name, config in TINY_MODELS.items()}
PROMPTS = [[(7 * i * i + 13 * j + 5) % 150 for j in range(length)]
           for i, length in enumerate((19, 5, 33, 12))]
PROMPTS[3][:9] = PROMPTS[0][:9]  # two of them begin alike
CACHES = pytest.mark.parametrize("cache", [torch.float32, FP8], ids=["float32", "fp8"])
# Where rounding decides between two neighbours in an FP8 cache, all that follows moves a little.
CLOSE = {torch.float32: 1e-4, FP8: 0.05}
GREEDY = SamplingParams(temperature=0, max_tokens=9, logprobs=0)
DRAWN = SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
                       seed=5, max_tokens=9, logprobs=0)


class LogitsRunner(ModelRunner):
    """Keeps the logits behind every token: {(request id, completion, length): logits [vocab]}."""

    def __init__(self, decoder, config: EngineConfig, cache=torch.float32):
        c = decoder.config
        caches = [  # full of NaN: whatever is read must have been written
            nan_cache(c.num_layers, config.num_blocks, config.block_size, c.num_kv_heads,
                      c.head_dim, cache) for _ in range(2)
        ]
        super().__init__(decoder, caches[0], config, "torch", caches[1])
        self.kept: dict[tuple, torch.Tensor] = {}

    def watch(self, engine):
        self.engine = engine

    def execute(self, batch):
        results = super().execute(batch)
        self.keep(batch)
        return results

    def keep(self, batch):
        for row, request in enumerate(self.engine.scheduler.scheduled):
            if batch.samples[row]:
                key = request.output.request_id, request.completion.index, batch.seq_lens[row]
                self.kept[key] = self.logits[row].clone()


def serve(requests, model="llama", one_by_one=False, cache=torch.float32, make=None, **config):
    """Run (prompt, params) requests; returns {(request id, completion): (tokens, logits [tokens,
    vocab])}. make(config): the runner, if not one over the model of that name."""
    config = EngineConfig(**(dict(num_blocks=64, block_size=4, max_model_len=200) | config))
    runner = LogitsRunner(DECODERS[model], config, cache) if make is None else make(config)
    engine = Engine(config, runner)
    outputs = {}
    for prompt, params in requests:
        engine.add_request(prompt, params)
        if one_by_one:
            outputs |= run(engine)
    outputs |= run(engine)
    served = {}
    for name, output in outputs.items():
        for completion in output.outputs:
            first = len(output.prompt_token_ids)
            rows = [
                runner.kept[name, completion.index, first + i]
                for i in range(len(completion.token_ids))
            ]
            served[name, completion.index] = completion.token_ids, torch.stack(rows)
    served["engine"] = engine
    return served


def assert_same(got: dict, want: dict, atol=1e-4) -> None:
    keys = [key for key in want if key != "engine"]
    assert [key for key in got if key != "engine"] == keys
    for key in keys:
        assert got[key][0] == want[key][0], key
        torch.testing.assert_close(got[key][1], want[key][1], rtol=0, atol=atol)


@pytest.fixture(scope="module", params=[GREEDY, DRAWN], ids=["greedy", "drawn"])
def requests(request):
    return [(prompt, request.param) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(requests):
    """Every request by itself, its prompt in one piece, nothing cached."""
    return serve(requests, one_by_one=True, enable_prefix_caching=False)


@CACHES
@pytest.mark.parametrize("model", TINY_MODELS)
def test_the_paged_engine_says_what_the_whole_sequence_says(model, cache):
    served = serve([(prompt, GREEDY) for prompt in PROMPTS], model, cache=cache)
    for number, prompt in enumerate(PROMPTS):
        tokens, logits = served[str(number), 0]
        whole = logits_of(DECODERS[model], prompt + tokens, lambda rows: kept(rows, cache))
        torch.testing.assert_close(logits, whole[len(prompt) - 1:-1], rtol=0, atol=CLOSE[cache])
        assert tokens == whole[len(prompt) - 1:-1].argmax(-1).tolist()


@pytest.fixture(scope="module")
def alone_in_fp8(requests):
    return serve(requests, one_by_one=True, enable_prefix_caching=False, cache=FP8)


def test_alone_and_batched(requests, alone):
    assert_same(serve(requests), alone)


@pytest.mark.parametrize("shape", [
    dict(),
    dict(max_num_batched_tokens=1, max_num_seqs=2),
    dict(max_num_batched_tokens=7),
    dict(block_size=1, num_blocks=200, prefix_cache="radix"),
    dict(block_size=17),
    dict(num_blocks=12, max_num_batched_tokens=16),
    dict(num_blocks=12, max_num_batched_tokens=16, preemption="swap")
], ids=str)
def test_an_fp8_cache_whatever_the_schedule(requests, alone_in_fp8, shape):
    """Batched, in chunks, in blocks of any size, preempted by either policy."""
    served = serve(requests, cache=FP8, **shape)
    assert_same(served, alone_in_fp8, CLOSE[FP8])
    assert served["engine"].scheduler.num_preemptions or shape.get("num_blocks") != 12


def test_an_fp8_cache_differs_from_a_plain_one(requests, alone, alone_in_fp8):
    """By the cost of eight bits, and by something: the cache is what was asked for."""
    differences = [(alone[key][1][0] - alone_in_fp8[key][1][0]).abs().max().item() for key in alone
                   if key != "engine"]
    assert all(1e-3 < difference < 1 for difference in differences), differences


@pytest.mark.parametrize("budget", range(1, 34))
def test_whole_and_in_chunks_of_every_size(requests, alone, budget):
    assert_same(serve(requests, max_num_batched_tokens=budget, max_num_seqs=2), alone)


@pytest.mark.parametrize("block_size", range(1, 18))
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_every_block_size(requests, alone, block_size, prefix_cache):
    assert_same(serve(requests, block_size=block_size, num_blocks=200, prefix_cache=prefix_cache),
                alone)


@pytest.mark.parametrize("prefix_cache, cache", [("hash", torch.float32), ("radix", torch.float32),
                                                 ("hash", FP8)])
def test_cold_and_warm(requests, alone, alone_in_fp8, prefix_cache, cache):
    both = serve(requests + requests, one_by_one=True, prefix_cache=prefix_cache, cache=cache)
    warm = {(str(int(key[0]) - len(requests)), 0): value
            for key, value in both.items() if key != "engine" and int(key[0]) >= len(requests)}
    assert_same(warm, alone_in_fp8 if cache == FP8 else alone, CLOSE[cache])
    assert both["engine"].prefix_cache is not None and len(both["engine"].prefix_cache) > 10


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [11, 12, 14])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_or_not_and_by_either_policy(requests, alone, preemption, num_blocks, caching):
    served = serve(requests, num_blocks=num_blocks, preemption=preemption,
                   max_num_batched_tokens=16, enable_prefix_caching=caching)
    assert_same(served, alone)
    if num_blocks == 12:
        assert served["engine"].scheduler.num_preemptions > 0


@CACHES
@pytest.mark.parametrize("length", [11, 12, 13])
def test_samples_of_one_request_and_of_several_with_their_seeds(length, cache):
    prompt, n = PROMPTS[2][:length], 4
    params = dict(temperature=1.0, max_tokens=8, logprobs=0)
    together = serve([(prompt, SamplingParams(n=n, seed=20, **params))], cache=cache)
    apart = serve([(prompt, SamplingParams(seed=20 + i, **params)) for i in range(n)], cache=cache)
    assert_same({(str(i), 0): together["0", i] for i in range(n)}, apart, CLOSE[cache])
    assert len({tuple(together["0", i][0]) for i in range(n)}) == n
    preempted = serve([(prompt, SamplingParams(n=n, seed=20, **params))], num_blocks=10,
                      cache=cache)
    assert_same(preempted, together, CLOSE[cache])
    assert preempted["engine"].scheduler.num_preemptions > 0


def test_a_seed_draws_the_same_whatever_shares_the_batch():
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=0)
    alone = serve([(PROMPTS[1], seeded)])["0", 0]
    for others in range(1, 4):
        crowd = [(prompt, SamplingParams(max_tokens=3 + i, logprobs=0))
                 for i, prompt in enumerate(PROMPTS[:others])]
        assert serve(crowd + [(PROMPTS[1], seeded)])[str(others), 0][0] == alone[0]


def test_logprobs_are_those_of_the_logits():
    config = EngineConfig(num_blocks=64, block_size=4)
    runner = LogitsRunner(DECODERS["qwen3"], config)
    engine = Engine(config, runner)
    engine.add_request(PROMPTS[0], SamplingParams(temperature=0.8, seed=1, max_tokens=5,
                                                  logprobs=3))
    (output,) = run(engine).values()
    (completion,) = output.outputs
    for i, (token, logprobs) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)):
        want = runner.kept["0", 0, len(PROMPTS[0]) + i].log_softmax(-1)
        assert set(logprobs) == {token, *want.topk(3).indices.tolist()}
        assert all(abs(value - want[token].item()) < 1e-5 for token, value in logprobs.items())


@CACHES
@pytest.mark.parametrize("model", TINY_MODELS)
@pytest.mark.parametrize("width", [2, 3])
def test_beam_search_is_the_brute_force_search(model, width, cache):
    """Beams share blocks and copy those that they write to, with all that lies in them."""
    decoder = DECODERS[model]
    config = EngineConfig(num_blocks=64, block_size=4)
    engine = Engine(config, LogitsRunner(decoder, config, cache))
    end = list(range(0, decoder.config.vocab_size, 7))
    engine.add_request(PROMPTS[0],
                       BeamSearchParams(beam_width=width, max_tokens=6, stop_token_ids=end))
    (output,) = run(engine).values()

    def distribution(tokens):
        logits = logits_of(decoder, tokens, lambda rows: kept(rows, cache))[-1]
        return dict(enumerate(logits.log_softmax(-1).tolist()))

    best = brute_force(PROMPTS[0], width, 6, end, distribution)
    assert [c.token_ids for c in output.outputs] == [tokens for tokens, _ in best]
    got = [completion.cumulative_logprob for completion in output.outputs]
    assert got == pytest.approx([total for _, total in best], abs=CLOSE[cache])
