"""Protects sampling: which tokens may be drawn and how often, that a seed decides alone, that a row
never depends on its neighbours, and that the logits are read and not written."""

import math
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged import sampler
from paged.batch import Batch, newcomer
from paged.rules import IN_PROMPT, Rules
from paged.sampler import amend, draw, logprobs, uniform
from paged.sampling import PROMPT, SamplingParams
from paged.seats import Seats


@dataclass
class Request:
    params: SamplingParams
    seed: int = 0
    token_ids: list[int] = field(default_factory=lambda: [0])
    num_prompt_tokens: int = 1
    rules: Rules | None = None


def seated(requests, vocab, device="cpu"):
    """Seats with these requests in them, from seat 0 on."""
    rows, state = range(len(requests)), Seats(len(requests), 1, vocab, torch.device(device))
    people = [newcomer(row, request) for row, request in enumerate(requests)]
    state.update(Batch(seats=list(rows), newcomers=people, query_start_loc=[*rows, len(requests)]))
    return state


def choose(logits, requests):
    """The tokens drawn [requests] from logits [requests, vocab]."""
    lengths = torch.tensor([len(request.token_ids) for request in requests], device=logits.device)
    people = [newcomer(row, request) for row, request in enumerate(requests)]
    if not any(new.history for new in people):  # as many as one likes
        numbers = torch.tensor([new.numbers for new in people]).clamp(max=1e30)
        integers = torch.tensor(
            [[(n + 2**63) % 2**64 - 2**63 for n in new.integers] for new in people])
        integers = integers.to(logits.device)
        return draw(logits, numbers.to(logits.device), integers, lengths - integers[:, PROMPT])
    return drawn_by(seated(requests, logits.shape[-1], logits.device), logits, lengths)


def drawn_by(state, logits, lengths):
    """The tokens that a step draws for contexts of these lengths, in seats from 0 on."""
    rows, device = len(logits), logits.device
    out = torch.zeros(1, rows, dtype=torch.int64, device=device)
    sampler.sample(logits, torch.arange(rows, device=device), lengths,
                   torch.ones(rows, device=device), state, out,
                   torch.zeros(1, dtype=torch.int64, device=device))
    return out[0]


def sample(logits, requests):
    """The tokens drawn, and the log-probabilities of those that asked for them."""
    tokens, found = choose(logits, requests), []
    for row, request in enumerate(requests):
        wanted = request.params.logprobs
        found.append(None)
        if wanted is not None:
            ids, values = logprobs(logits[row:row + 1], tokens[row:row + 1], wanted)
            found[-1] = dict(zip(ids[0].tolist(), values[0].tolist()))
    return tokens.tolist(), found


def frequencies(logits, points=2000, **params):
    """How often each token is drawn with an even grid of uniform numbers; exact up to 1 /
    points."""
    grid = count()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "uniform", lambda seed, step: (next(grid) + 0.5) / points)
        requests = [Request(SamplingParams(**params))] * points
        tokens = choose(torch.as_tensor(logits).expand(points, -1), requests)
    return torch.bincount(tokens, minlength=len(logits)) / points


def allowed(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """The specification, in float64 and one token at a time: the tokens that may be drawn."""
    order = sorted(range(len(probabilities)),
                   key=lambda i: -probabilities[i])  # stable: the lower id first
    order = [i for i in order if probabilities[i] >= min_p * probabilities[order[0]]]
    order = order[:top_k or None]
    total, mass, kept = sum(probabilities[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += probabilities[i]
        if top_p < 1 and mass >= top_p * total * (1 - 1e-6):
            break
    return set(kept)


P = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, P),
        ({"top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),  # .4 falls short of .6, so .3 stays as well
        ({"top_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),  # reached exactly: .2 goes
        ({"top_p": 0.71}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_p": 1e-9}, [0, 0, 0, 1]),
        ({"top_p": 1.0}, P),
        ({"top_k": 1}, [0, 0, 0, 1]),
        ({"top_k": 3}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 4}, P),
        ({"top_k": 400}, P),
        ({"top_k": 3, "top_p": 0.5}, [0, 0, 3 / 7, 4 / 7
                                      ]),  # half of what top-k left: .45, so .4 is not enough
        ({"min_p": 0.5}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 1.0}, [0, 0, 0, 1]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"temperature": 1e-30}, [0, 0, 0, 1]),
        ({"temperature": 1e30}, [0.25] * 4),
        ({"temperature": 0}, [0, 0, 0, 1]),
    ])
def test_which_tokens_and_how_often(params, expected):
    for shift in (0, 50, -50):  # adding a constant to all logits changes nothing
        found = frequencies([math.log(p) + shift for p in P], **params)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-3,
                                   rtol=0)


def test_the_numbers_are_uniform():
    numbers = torch.tensor([uniform(seed, step) for seed in range(100) for step in range(100)])
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) > 9900
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert ((counts - 500).abs() < 5 * 500**0.5).all()
    steps = numbers.view(100, 100)
    for moved in (steps[1:, :] - steps[:-1, :],
                  steps[:, 1:] - steps[:, :-1]):  # neighbours are unrelated
        assert abs(moved.abs().mean() - 1 / 3) < 0.02


def test_the_numbers_are_those_of_splitmix():
    """SplitMix64 begins with 0xE220A8397B1DCDAF from the state 0 and with these two from 1234567
    (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64)."""
    state = 1234567 - 0xE220A8397B1DCDAF
    known = {state: 6457827717110365317, state + 0x9E3779B97F4A7C15: 3203168211198807973}
    for place, number in known.items():
        assert uniform(0, place) == uniform(2**64, place) == (number >> 41) / 2**23


def test_drawn_tokens_follow_the_distribution():
    requests = [Request(SamplingParams(), seed=seed) for seed in range(20_000)]
    tokens = choose(torch.tensor(P).log().expand(len(requests), -1), requests)
    torch.testing.assert_close(
        torch.bincount(tokens) / len(requests), torch.tensor(P), atol=0.015, rtol=0)


def test_every_seed_is_a_number():
    for seed in (-1, 0, 2**63, 2**64 + 1, 10**30):
        assert 0 <= uniform(seed, 5) < 1


PARAMS = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
                   top_k=st.sampled_from([0, 1, 3, 50]), top_p=st.sampled_from([0.1, 0.5, 0.9,
                                                                                1.0]),
                   min_p=st.sampled_from([0.0, 0.05, 0.5]), repetition_penalty=st.sampled_from(
                       [1.0, 1.3]), logprobs=st.sampled_from([None, 0, 2]))

BATCH, VOCAB = st.lists(PARAMS, min_size=1, max_size=6), st.sampled_from([5, 40, 2500])


def random_batch(params, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(params), vocab, generator=generator)
    requests = [
        Request(p, seed * 31 + i, [i % vocab, 1, 2][:1 + i % 3], 1) for i, p in enumerate(params)
    ]
    return logits, requests


@settings(max_examples=60)
@given(BATCH, st.integers(0, 10**6), VOCAB, st.randoms())
def test_a_row_does_not_depend_on_its_neighbours(params, seed, vocab, random):
    logits, requests = random_batch(params, vocab, seed)
    together, logprobs = sample(logits, requests)
    order = list(range(len(params)))
    random.shuffle(order)
    shuffled, _ = sample(logits[order], [requests[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for i, request in enumerate(requests):
        alone, own = sample(logits[i:i + 1], [request])
        assert alone == [together[i]]
        assert (own and own[0]) == (logprobs and logprobs[i])


@settings(max_examples=60)
@given(BATCH, st.integers(0, 10**6), VOCAB)
def test_a_drawn_token_is_one_that_may_be_drawn_and_logits_are_only_read(params, seed, vocab):
    logits, requests = random_batch(params, vocab, seed)
    before = logits.clone()
    tokens, _ = sample(logits, requests)
    assert torch.equal(logits, before)
    for row, request, token in zip(logits.double(), requests, tokens, strict=True):
        p = request.params
        for seen in set(request.token_ids):
            row[seen] *= p.repetition_penalty**(-1 if row[seen] > 0 else 1)
        if p.temperature == 0:
            assert token == row.float().argmax()
        else:
            probabilities = (row / p.temperature).softmax(0).tolist()
            assert token in allowed(probabilities, p.top_k, p.top_p, p.min_p)


@pytest.mark.parametrize("spread",
                         [0.0, 0.5, 1.0, 6.0])  # from flat, where all is sorted, to peaked
@pytest.mark.parametrize("params", [{"top_p": 0.6}, {"top_p": 0.99}, {"top_k": 20}, {"top_k": 1500},
                                    {"top_k": 1500, "top_p": 0.9}, {"top_k": 30, "top_p": 0.5}])
def test_large_vocabularies(spread, params):
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    weights = logits.double().softmax(0)
    kept = torch.zeros(3000, dtype=torch.bool)
    kept[list(allowed(weights.tolist(), **params))] = True
    ask = SamplingParams(**params)
    found = sampler.keep_likeliest((logits - logits.max()).exp()[None], torch.tensor([ask.top_k]),
                                   torch.tensor([ask.top_p]))[0]
    assert abs(int((found > 0).sum())
               - int(kept.sum())) <= 1  # a sum in float32 may end one token off
    assert int(((found > 0) != kept).sum()) <= 1


def test_equal_tokens_are_kept_by_their_ids():
    assert frequencies([1.0] * 6, top_k=2).tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert frequencies([1.0] * 4, top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    tokens = choose(torch.zeros(200, 3000),
                    [Request(SamplingParams(top_k=3), seed) for seed in range(200)])
    assert set(tokens.tolist()) == {0, 1, 2}


def test_greedy_rows_of_a_mixed_batch_are_argmax():
    logits = torch.randint(0, 3, (64, 50),
                           generator=torch.Generator().manual_seed(2)).float()  # full of ties
    params = [SamplingParams(temperature=i % 2, top_p=0.5 + i % 3 * 0.25) for i in range(64)]
    requests = [Request(p, seed) for seed, p in enumerate(params)]
    tokens, _ = sample(logits, requests)
    assert tokens[::2] == logits.argmax(-1).tolist()[::2]
    assert tokens[1::2] != logits.argmax(-1).tolist()[1::2]


def test_the_place_of_a_token_counts_what_was_generated():
    """A prompt's length does not matter, the number of generated tokens does."""
    logits = torch.zeros(1, 1000)

    def drawn(prompt, output):
        return sample(logits, [Request(SamplingParams(), 7, [0] * (prompt + output), prompt)])[0]

    assert drawn(3, 0) == drawn(9, 0) and drawn(3, 4) == drawn(9, 4)
    assert len({drawn(3, output)[0] for output in range(20)}) > 15


def amended(logits, request):
    """Logits [1, vocab] after the rules and penalties of a request."""
    state = seated([request], logits.shape[-1])
    place = torch.tensor([len(request.token_ids) - request.num_prompt_tokens])
    return amend(logits, state.floats[:1], place, state.history[:1], state.marks[:1])


def test_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, seen = torch.randn(1, 30, generator=torch.Generator().manual_seed(0)), [3, 3, 7, 12, 29]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits.clone())
    request = Request(SamplingParams(repetition_penalty=1.7), token_ids=seen)
    assert torch.equal(amended(logits, request), expected)


def test_presence_and_frequency_look_at_the_output_alone():
    """OpenAI's formula: logits − count × frequency − (count > 0) × presence."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    request = Request(params, token_ids=[1, 1, 2, 3, 3, 1], num_prompt_tokens=3)
    assert seated([request], 5).history[0].tolist() == [0, IN_PROMPT + 1, IN_PROMPT, 2, 0]
    assert amended(torch.zeros(1, 5), request)[0].tolist() == [0, -0.75, 0, -1.0, 0]


def test_logprobs_are_the_models_own():
    logits = torch.tensor([P, P, P]).log()
    requests = [
        Request(SamplingParams(temperature=0, logprobs=2, repetition_penalty=9.0), token_ids=[3]),
        Request(SamplingParams(temperature=0.01)),
        Request(SamplingParams(temperature=0, logprobs=0))
    ]
    tokens, logprobs = sample(logits, requests)
    assert tokens[0] == 2 and logprobs[1] is None  # .4 was seen, and falls behind .3 ...
    assert logprobs[0] == pytest.approx({2: math.log(0.3), 3: math.log(0.4)})  # ... but not here
    assert logprobs[2] == pytest.approx({3: math.log(0.4)})


def test_more_logprobs_than_tokens():
    _, logprobs = sample(torch.zeros(1, 3), [Request(SamplingParams(logprobs=20))])
    assert logprobs[0] == pytest.approx(dict.fromkeys(range(3), math.log(1 / 3)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"logprobs": 1}])
def test_broken_logits_fail_their_row_alone(bad, params):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    tokens = choose(logits, [Request(SamplingParams(**params))] * 3)
    assert [token == -1 for token in tokens.tolist()] == [False, True, False]


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = torch.full((300, 10), -math.inf)
    logits[:, [2, 7]] = 0.0
    for params in ({}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 100.0}):
        tokens, _ = sample(logits, [Request(SamplingParams(**params), seed) for seed in range(300)])
        assert set(tokens) == {2, 7}
    assert choose(torch.full((1, 10), -math.inf), [Request(SamplingParams())]).tolist() == [-1]


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws():
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, logprobs=2) for t in (0, 1.0)
        for k in (0, 20) for p in (0.8, 1.0)
    ]
    logits, requests = random_batch(params * 4, 3000, seed=3)
    here, there = sample(logits, requests), sample(logits.cuda(), requests)
    assert here[0] == there[0]
    for one, other in zip(here[1], there[1], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 2000}])
def test_nearly_equal_logits_that_change_places_draw_the_same_token(cut):
    """Beside other requests the same logits come out a rounding error apart; a seed draws the same
    token."""
    logits = torch.full((1, 2 * sampler.HEAD), -9.0)
    logits[0, [2, 5, 7]] = 1.0
    requests = [Request(SamplingParams(**cut), seed=seed) for seed in range(200)]
    drawn = []
    for likeliest in (2, 5, 7):
        nudged = logits.clone()
        nudged[0, likeliest] += 1e-6
        drawn.append(choose(nudged.expand(len(requests), -1), requests).tolist())
    assert drawn[0] == drawn[1] == drawn[2] and {2, 5, 7} <= set(drawn[0])
