"""Log-probabilities of a prompt: those of the prompt seen whole, in chunks of any size, beside
others, preempted, and though its blocks are cached.
"""

from dataclasses import replace

import pytest

from paged import LLM, SamplingParams
from paged.config import Speedups
from paged.models.decoder import Decoder, random_decoder
from paged.models.loader import Loaded
from tests.small_models import TINY_LLAMA, logits_of

PROMPT = [7, 100, 3, 9, 9, 42, 15, 8, 77, 100, 3]


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(TINY_LLAMA, seed=3)


def open_llm(decoder, num_blocks=40, **options):
    loaded = Loaded(decoder, decoder.config, None, set(), 0)
    return LLM(loaded, num_blocks=num_blocks, block_size=4, use_tqdm=False, **options)


def check_prompt(decoder, output, prompt, count):
    """They must be those of the prompt seen whole."""
    found = output.prompt_logprobs
    assert len(found) == len(prompt) and found[0] is None
    scores = logits_of(decoder, prompt).log_softmax(-1)
    for place, (token, told) in enumerate(zip(prompt[1:], found[1:])):
        likeliest = scores[place].topk(count).indices.tolist()
        assert set(told) == {token, *likeliest} and next(iter(told)) == token
        for number, value in told.items():
            assert value == pytest.approx(scores[place, number].item(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 3}, {"max_num_batched_tokens": 1}, {"max_num_seqs": 2},
     {"enable_prefix_caching": False}, {"prefix_cache": "radix"}, {
         "speedups": Speedups(run_ahead=True), "max_num_batched_tokens": 4
     }, {"num_blocks": 8, "max_num_batched_tokens": 5, "speedups": Speedups(run_ahead=True)}],
    ids=str)
def test_prompt_logprobs_are_those_of_the_whole_prompt(decoder, options):
    """In chunks of any size, beside others, preempted, and though its blocks are cached."""
    asks = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    bare = SamplingParams(temperature=0, max_tokens=4)
    with open_llm(decoder, **options) as llm:
        plain = llm.generate([PROMPT, PROMPT[:5], PROMPT[:1]], bare)  # from here on it is cached
        prompts = [PROMPT, PROMPT[:5], PROMPT[:1], PROMPT[::-1], PROMPT]
        some = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=1)
        found = llm.generate(prompts, [asks, some, asks, asks, bare])
        for output, prompt, count in zip(found, prompts, (2, 0, 2, 2)):
            check_prompt(decoder, output, prompt, count)
            assert output.num_cached_tokens == 0, "all of such a prompt is computed"
        assert found[4].prompt_logprobs is None
        assert found[4].num_cached_tokens == (8
                                              if options.get("enable_prefix_caching", True) else 0)
        for one, two in zip(plain, found):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert len(found[1].outputs[0].logprobs) == 4


def test_prompt_logprobs_of_several_completions(decoder):
    with open_llm(decoder, max_num_seqs=3) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=3, prompt_logprobs=1))
        check_prompt(decoder, output, PROMPT, 1)
        assert len({tuple(c.token_ids) for c in output.outputs}) > 1


def test_prompt_logprobs_beside_graphs(monkeypatch):
    """A replayed step keeps no hidden states: one that needs them is run, through fused operations,
    padding and all."""
    pytest.importorskip("triton")
    monkeypatch.setattr(Decoder, "pack", lambda self: self)
    decoder = random_decoder(replace(TINY_LLAMA, num_layers=1), seed=3)
    speedups = Speedups(fused=True, run_ahead=True, graphs=False)
    with open_llm(decoder, speedups=speedups, max_num_seqs=2, attention_backend="reference") as llm:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        output = llm.generate([PROMPT[:4]], params)[0]
        check_prompt(decoder, output, PROMPT[:4], 1)


def test_a_snapshot_keeps_its_prompt_logprobs(decoder):
    with open_llm(decoder, max_num_batched_tokens=2) as llm:
        first, *_, last = llm.stream(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))
        assert first.prompt_logprobs is not last.prompt_logprobs
        check_prompt(decoder, last, PROMPT, 0)
