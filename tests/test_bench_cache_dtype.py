"""The measure of a smaller cache: its roundings are the cache's own, its passes change nothing but
K and V, and its record holds what the chapter reads."""

import json
import math

import pytest
import torch

from paged.__main__ import main
from paged.bench import cache_dtype
from paged.fp8 import dequantize, quantize
from paged.lab.notebook import record
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded
from tests.small_models import TINY_LLAMA, logits_of

IDS = [(7 * i * i + 3) % 200 for i in range(50)]


def loaded() -> Loaded:
    return Loaded(random_decoder(TINY_LLAMA, seed=1), TINY_LLAMA, None, set(), 0)


def test_fp8_by_rows_is_what_the_cache_does():
    x = torch.randn(9, 2, 12) * torch.logspace(-3, 3, 9)[:, None, None]
    torch.testing.assert_close(cache_dtype.kept("fp8 row", x), dequantize(*quantize(x)), rtol=1e-5,
                               atol=0)


@pytest.mark.parametrize("kind, step", [("fp8", 1 / 16), ("int8", 0.5 / 127), ("int4", 0.5 / 7)])
@pytest.mark.parametrize("axis", [*cache_dtype.AXES, "group"])
def test_no_number_is_off_by_more_than_half_a_step_of_its_scale(kind, step, axis):
    x = torch.randn(9, 2, 32)
    back = cache_dtype.kept(f"{kind} {axis}", x)
    largest = x.abs().amax(cache_dtype.AXES.get(axis, 2), keepdim=True)
    assert ((back - x).abs() <= largest * step * (1 + 1e-5)).all() and not torch.equal(back, x)
    if axis == "group":
        assert cache_dtype.error(back, x) < cache_dtype.error(cache_dtype.kept(f"{kind} row", x), x)


def test_a_pass_is_the_model_over_that_cache():
    losses, best = cache_dtype.read(loaded(), IDS, "float32")
    logits = logits_of(loaded().decoder, IDS)[:-1]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="none")
    assert losses == pytest.approx(want.tolist(), abs=1e-3) and best == logits.argmax(-1).tolist()
    small = cache_dtype.read(loaded(), IDS, "int4 row")[0]
    logits = logits_of(loaded().decoder, IDS, lambda rows: cache_dtype.kept("int4 row", rows))
    want = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]), reduction="none")
    assert small == pytest.approx(want.tolist(), abs=1e-3) and small != losses


def test_bits_count_the_scales():
    names = ("bfloat16", "fp8 tensor", "fp8 row", "int4 row", "int4 group")
    assert [cache_dtype.bits(name, 64) for name in names] == [16, 8, 8.5, 4.5, 6]


def test_everything_is_measured_and_the_published_record_holds_it():
    parts: dict = {}
    cache_dtype.measure(loaded(), IDS, 20, 2, 30, 3, parts.__setitem__)
    published = record("fp8_cpu")
    assert set(parts) <= set(published) and published["commit"]
    assert set(parts["passes"]) == set(published["passes"])
    assert set(parts["errors"]) == set(published["errors"])
    assert len(parts["errors"]["fp8 row"]["attention"]) == TINY_LLAMA.num_layers
    assert len(parts["generated"]["fp8"]) == len(cache_dtype.QUESTIONS)
    assert parts["shown"]["k"] != parts["shown"]["k_before_rotary"]
    lines = cache_dtype.summary(parts).splitlines()
    assert len(lines) == 1 + len(cache_dtype.PASSES) and "100.0%" in lines[1]
    flat = [loss for part in parts["passes"]["fp8 row"]["loss"] for loss in part]
    assert len(flat) == 2 * 19
    assert cache_dtype.perplexity(parts["passes"]["fp8 row"]["loss"]) == pytest.approx(
        math.exp(sum(flat) / len(flat)))
    assert json.dumps(parts)


@pytest.mark.parametrize("argv, words", [
    (["--window", "0"], "--window is 0"),
    (["--output", "/nonexist/x.json"], "/nonexist/x.json cannot be written"),
    (["--text", "/nonexist.txt"], "nonexist.txt"),
])
def test_mistakes_are_a_sentence(argv, words, capsys):
    assert main(["bench", "cache_dtype", *argv]) == 2
    assert words in capsys.readouterr().err
