"""What a request may ask beside its tokens: which text the end has, how much of the prompt is read;
and the ranges of all numbers, in the precision that computes.

Protects callers from ends that are or are not in the text, and from values that float32 turns into
others.
"""

import math

import numpy as np
import pytest
import torch

from paged import LLM, BeamSearchParams, SamplingParams
from paged.engine import Engine, EngineConfig
from paged.lab.oracle import OracleRunner
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from paged.rules import make_rules
from tests.small_models import TINY_LLAMA
from tests.test_detokenizer import Pieces
from tests.test_sampler import Request, choose

PROMPT = [7, 100, 3, 9, 9, 42, 15, 8, 77, 100, 3]

# ── how much of the prompt ────────────────────────────────────────────────────────────────────────


def test_the_last_tokens_of_a_longer_prompt():
    loaded = Loaded(random_decoder(TINY_LLAMA), TINY_LLAMA, None, set(), 0)
    with LLM(loaded, num_blocks=8, block_size=4, max_model_len=16, use_tqdm=False) as llm:

        def ids(prompt, **params):
            output = llm.generate([prompt], SamplingParams(max_tokens=4, **params))[0]
            return output.prompt_token_ids

        assert ids(PROMPT, truncate_prompt_tokens=3) == PROMPT[-3:]
        assert ids(PROMPT, truncate_prompt_tokens=len(PROMPT)) == PROMPT
        assert ids(PROMPT, truncate_prompt_tokens=10**9) == PROMPT
        assert ids(PROMPT * 9, truncate_prompt_tokens=13) == (PROMPT * 9)[-13:]
        with pytest.raises(ValueError, match="prompt of 14 tokens"):
            ids(PROMPT * 9, truncate_prompt_tokens=14)


# ── the text of the end ───────────────────────────────────────────────────────────────────────────


class Scripted:
    """Says the same tokens to everybody."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def execute(self, batch):
        return [self.tokens[max(length - 2, 0)] for length in batch.seq_lens]


class Special(Pieces):
    """The last piece is a special token."""

    def token_bytes(self, token_id, skip_special_tokens=True):
        special = token_id == len(self.pieces) - 1
        return b"" if special and skip_special_tokens else self.pieces[token_id]


def said(pieces, tokens=None, **params):
    tokens = range(len(pieces)) if tokens is None else tokens
    runner = Scripted(*tokens)
    engine = Engine(EngineConfig(num_blocks=8, block_size=4), runner, Special(pieces))
    engine.add_request([0, 0], SamplingParams(max_tokens=len(runner.tokens), **params))
    pushed = ""
    while engine.has_unfinished():
        for output in engine.step():
            pushed += output.outputs[0].new_text
    completion = output.outputs[0]
    assert pushed == completion.text
    return completion.text, completion.finish_reason, completion.stop_reason


def test_the_stop_string_is_in_the_text_where_asked_for():
    pieces = [b"one S", b"TO", b"P two", b"x", b"<end>"]
    assert said(pieces, stop="STOP") == ("one ", "stop", "STOP")
    assert said(pieces, stop="STOP",
                include_stop_str_in_output=True) == ("one STOP", "stop", "STOP")
    both = ["STOP", "TOP t"]
    assert said(pieces, stop=both, include_stop_str_in_output=True)[0] == "one STOP"


def test_the_token_that_ends_is_in_the_text_where_asked_for():
    pieces = [b"a", b"b", b"c", b"<end>"]
    assert said(pieces, stop_token_ids=[1]) == ("a", "stop", 1)
    assert said(pieces, stop_token_ids=[1], include_stop_str_in_output=True) == ("ab", "stop", 1)
    ends = dict(stop_token_ids=[3], include_stop_str_in_output=True)
    assert said(pieces, **ends)[0] == "abc"
    assert said(pieces, **ends, skip_special_tokens=False)[0] == "abc<end>"
    # It ends as a token, even where a stop string is complete with it, and nothing is held back.
    assert said(pieces, stop_token_ids=[1], stop=["b"], include_stop_str_in_output=True)[0] == "ab"
    assert said(pieces, stop_token_ids=[1], stop=["ac"], include_stop_str_in_output=True)[0] == "ab"


def test_special_tokens_are_text_where_asked_for():
    pieces = [b"a", b"b", b"<end>"]
    order = [0, 2, 1, 2]
    assert said(pieces, order) == ("ab", "length", None)
    assert said(pieces, order, skip_special_tokens=False) == ("a<end>b<end>", "length", None)
    assert said(pieces, order, skip_special_tokens=False, stop="<end>") == ("a", "stop", "<end>")
    assert said(pieces, order, skip_special_tokens=False, stop_token_ids=[2]) == ("a", "stop", 2)


@pytest.mark.parametrize("least, text", [(0, ""), (1, "a"), (2, "aab"), (3, "aaba"), (4, "aabaa"),
                                         (5, "aabaaa")])
def test_no_stop_string_before_min_tokens(least, text):
    """It must be complete with a token behind the first min_tokens; where it begins is no
    matter."""
    pieces = [b"a", b"a", b"ba", b"a", b"a", b"a", b""]
    assert said(pieces, stop="a", min_tokens=least)[0] == text
    assert said(pieces, stop="x", min_tokens=least)[0] == "aabaaaa"


def test_a_stop_string_that_an_ignored_one_begins():
    """`a` comes too early to stop; it is held back as the beginning of `ab`, and must not count
    when more text comes."""
    pieces = [b"a", b"c", b"a", b"b", b""]
    assert said(pieces, stop=["a", "ab"], min_tokens=1) == ("ac", "stop", "a")
    assert said(pieces, stop=["a", "ab"], min_tokens=3) == ("ac", "stop", "ab")
    assert said(pieces, stop=["aa", "cab"], min_tokens=2,
                include_stop_str_in_output=True)[0] == ("acab")


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────

TINY, LAST = 2.0**-149, (2 - 2.0**-23) * 2.0**127  # float32's ends


@pytest.mark.parametrize(
    "name, bad", [("top_p", [0, 1e-46, TINY / 2, -0.1, 1.0000002, 2]),
                  ("min_p", [-0.1, -TINY, 1.0000002]), ("temperature", [-TINY, -1.0]),
                  ("repetition_penalty", [0, -1, 1e-46, 1e-40, 0.99e-6, 1.01e6, 1e39]),
                  ("presence_penalty", [-2.0000005, 2.0000005, 1e39]),
                  ("frequency_penalty", [-2.0000005, 2.0000005, -1e39]),
                  ("logit_bias", [{1: 100.001}, {1: -100.001}, {1: 1e39}, {1: math.nan}, {1: "1"},
                                  {-1: 1}, {"x": 1}, {1.5: 1}, [1], 5, {True: 1}]),
                  ("min_tokens", [-1, 17, 1.5, None]), ("allowed_token_ids", [[], "abc", [1.5], 5]),
                  ("bad_words", ["", ["a", ""], [1], 5, b"x"]),
                  ("prompt_logprobs", [-1, True, 1.5]), ("truncate_prompt_tokens", [0, -1, 1.5]),
                  ("include_stop_str_in_output", ["no", None, 2]),
                  ("skip_special_tokens", ["yes", None])])
def test_values_out_of_range_are_refused_by_name(name, bad):
    for value in bad:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
])
def test_no_number_is_too_odd_to_be_refused(name):
    for value in (math.nan, math.inf, -math.inf, 10**400, "1", None, 1j, [1.0], np.float64("nan")):
        with pytest.raises(ValueError, match=f"{name} is"):
            SamplingParams(**{name: value})


EDGES = [("top_p", [TINY, 1e-40, 1e-38, 1 - 2.0**-24, 1 - 1e-9, 1 + 1e-9, 1]),
         ("min_p", [0, -1e-46, 1e-46, TINY, 1e-40, 1 - 2.0**-24, 1, 1 + 1e-9]),
         ("temperature", [0, 1e-46, TINY, 1e-38, 1e-7, 1e30, LAST, 1e39, 1e300]),
         ("repetition_penalty", [1e-6, 1 - 1e-9, 1e6]), ("presence_penalty", [-2, 1e-46, 2]),
         ("frequency_penalty", [-2, TINY, 2]), ("logit_bias", [{3: 100}, {3: -100}, {3: TINY}, {}])]


@pytest.mark.parametrize("name, values", EDGES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_every_value_that_is_taken_draws_a_token_that_may_be_drawn(name, values, scale):
    """At both ends of each range, as float32 has them, for flat and for steep logits."""
    logits = scale * torch.linspace(-5, 5, 11)[None].repeat(20, 1)
    for value in values:
        params = SamplingParams(**{name: value})
        rules = make_rules(params, [])
        requests = [Request(params, seed, [*range(11)], 3, rules) for seed in range(20)]
        tokens = choose(logits, requests).tolist()
        assert min(tokens) >= 0
        if (name in ("top_p", "temperature") and value < 1e-6 or (name, value) == ("min_p", 1)):
            assert set(tokens) == {10}, f"{name}={value} keeps only the likeliest"


def test_beams_take_no_parameters_of_sampling():
    for name, value in {
            "logit_bias": {1: 1.0}, "allowed_token_ids": [1], "bad_words": ["a"], "min_tokens": 1,
            "prompt_logprobs": 1, "top_p": 0.5, "stop": "a", "skip_special_tokens": False,
            "logprobs": 3, "n": 2, "include_stop_str_in_output": True, "temperature": 1.0
    }.items():
        with pytest.raises(ValueError, match=f"{name} is .*: beam search takes"):
            BeamSearchParams(**{name: value})
    params = BeamSearchParams(truncate_prompt_tokens=2, stop_token_ids=[3], seed=1, max_tokens=3)
    assert params.logprobs == 8 and BeamSearchParams(logprobs=8).logprobs == 8


def test_beams_that_cannot_all_fit_are_a_sentence():
    engine = Engine(EngineConfig(num_blocks=8, block_size=4), OracleRunner(8, 4))
    with pytest.raises(ValueError, match="max_tokens=30 in 4 beams need 32 blocks of 4"):
        engine.add_request([1, 2], BeamSearchParams(max_tokens=30))


def test_a_length_penalty_that_would_leave_all_numbers():
    for bad in (10.1, -10.1, 1e308, math.inf, 10**400):
        with pytest.raises(ValueError, match="length_penalty is"):
            BeamSearchParams(length_penalty=bad)
    for penalty in (-10, 10.0):
        engine = Engine(EngineConfig(num_blocks=8, block_size=4), OracleRunner(8, 4))
        engine.add_request([1, 2], BeamSearchParams(length_penalty=penalty, max_tokens=4))
        while engine.has_unfinished():
            (output,) = engine.step()
        assert len(output.outputs) == 4
