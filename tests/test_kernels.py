"""The kernels around attention and the operations made of them, held to their specifications.

Protects the fast path: same residual stream, same K and V in the same slots, padding that touches
    nothing.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from paged import paged_attention
from paged.batch import Batch, Newcomer, newcomer
from paged.fp8 import FP8
from paged.kernels import sample as sample_kernels
from paged.kernels.elementwise import rotation_table, silu_mul
from paged.kernels.prepare import prepare
from paged.kernels.sample import sample
from paged.kv_cache import take
from paged.models.decoder import random_decoder
from paged.models.fused import FusedModel
from paged.rules import DRAWN, IN_PROMPT, MARKED, NEVER, make_rules
from paged.sampler import sample as plain_sample
from paged.sampling import SamplingParams
from paged.seats import Prepared, Seats
from paged.seats import prepare as plain_prepare
from tests.caches import nan_cache, one_step_apart
from tests.small_models import TINY_MODELS, TINY_QWEN3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_silu_mul():
    gate_up, x = torch.randn(3, 2 * 92, device=DEVICE), torch.randn(3, 44, device=DEVICE)
    torch.testing.assert_close(silu_mul(gate_up, None, 1e-5),
                               F.silu(gate_up[:, :92]) * gate_up[:, 92:])
    scaled = gate_up * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(silu_mul(gate_up, x, 1e-5), F.silu(scaled[:, :92]) * scaled[:, 92:])


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("num_tokens, narrow, cache",
                         [(1, 16, torch.float32), (5, 16, torch.float32), (5, 0, torch.float32),
                          (5, 16, FP8), (5, 0, FP8)])
def test_fused_operations_equal_the_plain_ones(name, num_tokens, narrow, cache):
    config = TINY_MODELS[name]
    decoder = random_decoder(config, seed=1, device=DEVICE)
    caches = [
        nan_cache(config.num_layers, 4, 4, config.num_kv_heads, config.head_dim, cache, DEVICE)
        for _ in range(2)
    ]
    positions = torch.arange(num_tokens, device=DEVICE)
    ids, slots = torch.randint(config.vocab_size, (num_tokens,),
                               device=DEVICE), positions + 8  # in block 2
    scale = config.head_dim**-0.5

    def plain(layer, q, k, v):
        caches[0].write(layer, slots, k, v)
        return paged_attention(q, caches[0], layer, [[2, 3]], [num_tokens], [0, num_tokens], scale)

    def fused(layer, q):
        return paged_attention(q, caches[1], layer, [[2, 3]], [num_tokens], [0, num_tokens], scale)

    want = decoder.logits(decoder(ids, positions, plain))
    # One row of padding beside the real ones, where there is more than one.
    pad = torch.tensor([-1], device=DEVICE) if num_tokens > 1 else positions[:0]
    fast = FusedModel(decoder, caches[1], 64, narrow)
    x = F.embedding(torch.cat((ids, pad.clamp(min=0))), decoder.embedding)
    step = Prepared(x,
                    x.square().sum(1, keepdim=True), torch.cat((positions, pad)),
                    torch.cat((slots, pad)), None)
    x = decoder.run(
        x,
        fast.operations(
            step, lambda layer, q: torch.cat(
                (fused(layer, q[:num_tokens]), torch.zeros_like(q[num_tokens:])))))
    rows = [
        torch.stack([take(part, torch.arange(4, device=DEVICE)) for part in (*kv.k, *kv.v)])
        for kv in caches
    ]
    if cache == FP8:  # a number that is rounded the other way moves what follows
        torch.testing.assert_close(fast.logits(x)[:num_tokens], want, atol=0.05, rtol=0.05)
        one_step_apart(rows[1], rows[0])
    else:
        torch.testing.assert_close(fast.logits(x)[:num_tokens], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert rows[1][:, :2].isnan().all(), "padding wrote to the cache"


def seated(num_seats, vocab_size, *newcomers):
    """Seats with these newcomers in them, each without its row, from seat 0 on."""
    state = Seats(num_seats, 4, vocab_size, torch.device(DEVICE))
    state.tokens.fill_(99)
    state.update(
        Batch(seats=list(range(len(newcomers))),
              newcomers=[Newcomer(row, *who) for row, who in enumerate(newcomers)],
              query_start_loc=list(range(len(newcomers) + 1))))
    return state


def asks(temperature=1.0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, seed=0,
         top_k=0, prompt=3, history=None):
    numbers = [temperature, top_p, min_p, repetition, presence, frequency, bool(history)]
    return (numbers, [seed, top_k, prompt, 0], history or {})


def draw(function, logits, state, seats=None, lengths=None, samples=None):
    """What a sampler puts out for these rows, each in its own seat unless `seats` says
    otherwise."""
    rows = len(logits)
    out = torch.full((2, rows), 77, dtype=torch.int32, device=DEVICE)
    seats = torch.arange(rows) if seats is None else torch.as_tensor(seats)
    lengths = torch.full((rows,), 5) if lengths is None else lengths
    samples = torch.ones(rows) if samples is None else samples
    turn, *inputs = (values.to(DEVICE, torch.int32)
                     for values in (torch.tensor([1]), seats, lengths, samples))
    function(logits, *inputs, state, out, turn)
    assert (out[0] == 77).all(), "the other turn's tokens were written"
    return out[1].tolist()


@pytest.mark.parametrize("function", [plain_sample, sample])
def test_greedy_sampling_is_argmax_and_nan_is_reported(function):
    logits = torch.randn(6, 9_000, device=DEVICE)
    logits[1] = float("nan")
    logits[3, 5_000], logits[4, 8_000] = float("nan"), float("inf")
    logits[5] = float("-inf")
    logits[2, 7] = logits[2, 8_900] = 50.0  # of equals, the first
    state = seated(7, 9_000, *[asks(temperature=0)] * 6)
    best = logits[0].argmax().item()
    assert draw(function, logits, state, [2, 0, 1, 3, 4, 5]) == [best, -1, 7, -1, -1, -1]
    assert state.tokens.tolist() == [99, 7, best] + [99] * 5, "a broken row has a token"
    state = seated(7, 9_000, *[asks(top_p=0.9)] * 6)
    broken = [token == -1 for token in draw(function, logits, state)]
    assert broken == [False, True, False, True, True, True]


def test_sampling_follows_the_probabilities_and_the_seed():
    rows = 4000 if DEVICE == "cuda" else 50  # the interpreter is slow
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    logits = (probabilities.log() * 0.7).repeat(rows, 1).to(DEVICE)
    state = seated(rows, 4, *[asks(temperature=0.7, seed=7919 * row) for row in range(rows)])
    first = draw(sample, logits, state)
    assert draw(sample, logits, state, range(rows)[::-1])[::-1] == first, "its place matters"
    share = torch.bincount(torch.tensor(first), minlength=4) / rows
    assert (share - probabilities).abs().max() < 4 * (0.25 / rows)**0.5
    later = torch.full((rows,), 6)
    assert draw(sample, logits, state, lengths=later) != first, "the next place draws the same"


def random_asks(generator, vocab_size):
    r = generator
    history, marks = {}, []
    if r.random() < 0.2:
        history = {
            r.randrange(vocab_size): r.choice([1, 2, IN_PROMPT, IN_PROMPT + 3])
            for _ in range(20)
        }
    penalties = dict(repetition=1.3, presence=0.5, frequency=0.2) if history else {}
    if r.random() < 0.2:
        marks = [[0.0, NEVER, 0]] + [[r.uniform(
            -3, 3), r.choice([0, 20]), r.randrange(3)] for _ in range(9)]
        history |= {
            r.randrange(vocab_size): MARKED + number + r.choice([0, IN_PROMPT])
            for number in range(10)
        }
    return *asks(r.choice([0, 0.7, 1, 1.5]), r.choice([1, 1, 0.9, 0.5, 0.99, 1 - 1e-9]),
                 r.choice([0, 0, 0.1, 0.02]), seed=r.randrange(-2**70, 2**70), top_k=r.choice([
                     0, 0, 1, 5, 50, vocab_size - 1, 10**9
                 ]), history=history, **penalties), 0, marks


@pytest.mark.parametrize("kind, vocab_size", [("flat", 211), ("peaked", 211), ("bfloat16", 211),
                                              ("float16", 5000), ("ties", 211), ("ties", 5000),
                                              ("holes", 5000)])
def test_the_kernel_draws_what_the_specification_draws(kind, vocab_size):
    """Every filter and penalty together, token for token, and the same histories after."""
    r = random.Random(f"{vocab_size} {kind}")
    rows = 64 if DEVICE == "cuda" else 12
    generator = torch.Generator().manual_seed(r.randrange(10**6))
    logits = torch.randn(rows, vocab_size, generator=generator) * (0.1 if kind == "flat" else 3)
    if kind.endswith("float16"):
        logits = logits.to(getattr(torch, kind))
    if kind == "ties":
        logits = torch.randint(0, 3, (rows, vocab_size), generator=generator).float()
    if kind == "holes":
        logits[::2, vocab_size // 3:] = float("-inf")
        logits[1, 5] = float("nan")
    people = [random_asks(r, vocab_size) for _ in range(rows)]
    states = [seated(rows, vocab_size, *people) for _ in range(2)]
    samples = torch.rand(rows, generator=generator) < 0.8
    lengths = torch.randint(4, 50, (rows,), generator=generator)
    logits = logits.to(DEVICE)
    want, got = (draw(function, logits, state, None, lengths, samples)
                 for function, state in zip((plain_sample, sample), states))
    assert got == want
    for name in ("tokens", "history", "marks"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name))


def test_the_kernel_follows_bad_words_as_the_specification_does():
    """Words of several tokens over a vocabulary of five, so that they come; one row in the middle
    of its prompt, where nothing is drawn."""
    rows, r = 12, random.Random(1)
    params = [
        SamplingParams(seed=row, min_tokens=row % 4, bad_words="x",
                       allowed_token_ids=[0, 1, 2, 4] if row % 3 else None,
                       repetition_penalty=1 + row % 2) for row in range(rows)
    ]
    people = []
    for row, ask in enumerate(params):
        words = [[r.randrange(5) for _ in range(length)] for length in (1, 2, 2, 3, 4)][row % 2:]
        request = SimpleNamespace(params=ask, rules=make_rules(ask, [1], words), seed=row,
                                  token_ids=[1, 2, 3, 4, 0][:4 + row % 2], num_prompt_tokens=3)
        new = newcomer(row, request)
        people.append((new.numbers, new.integers, new.history, new.rest, new.marks, new.words))
    states = [seated(rows, 5, *people) for _ in range(2)]
    samples = (torch.arange(rows) != 3).int()
    seats = r.sample(range(rows), rows)
    for step in range(5):
        logits = torch.randn(rows, 5, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        want, got = (draw(function, logits, state, seats, torch.full((rows,), 4 + step), samples)
                     for function, state in zip((plain_sample, sample), states))
        assert got == want
        for name in ("tokens", "history", "marks", "words"):
            assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
    assert states[0].words[:, DRAWN].any() and len(set(want)) > 2


@pytest.mark.parametrize("function", [plain_sample, sample])
def test_a_filter_that_removes_nothing_changes_nothing(function):
    logits = torch.randn(20, 3000, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    seeds = range(20)
    bare = draw(function, logits, seated(20, 3000, *[asks(seed=seed) for seed in seeds]))
    for idle in (dict(top_p=1 - 1e-12), dict(top_k=3000), dict(top_k=2**31 - 1), dict(min_p=1e-30)):
        state = seated(20, 3000, *[asks(seed=seed, **idle) for seed in seeds])
        assert draw(function, logits, state) == bare, idle


def test_prepare():
    tables = torch.tensor([[3, 1, 0], [2, 9, 9], [0, 0, 0]], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([70, 71, 0], dtype=torch.int32, device=DEVICE)
    ids, seats = [-1, 5, 6, 0], [1, 0]
    new_blocks, lengths, starts = [8, -1], [5, 3], [0, 1, 3]  # seat 1 has its second block, 8, now

    def make(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    embedding = torch.randn(80, 12, device=DEVICE)
    x, squares, positions, slots, of_rows = prepare(
        *map(make, (ids, seats, new_blocks, lengths, starts)), tables, tokens, embedding, 4)
    assert torch.equal(x, embedding[[71, 5, 6, 0]])
    torch.testing.assert_close(squares, x.square().sum(1, keepdim=True))
    assert positions.tolist() == [4, 1, 2, -1]
    assert slots.tolist() == [8 * 4, 3 * 4 + 1, 3 * 4 + 2, -1]
    assert tables.tolist() == [[3, 1, 0], [2, 8, 9], [0, 0, 0]]
    assert of_rows.shape == (2, 3) and of_rows[0, :2].tolist() == [2, 8]
    assert of_rows[1, :1].tolist() == [3]


def test_prepare_copies_tables_longer_than_a_program_takes_at_once():
    tables = torch.randint(1000, (3, 700), dtype=torch.int32, device=DEVICE)
    before = tables.clone()

    def make(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    *_, positions, slots, of_rows = prepare(make([-1] * 3), make([2, 1, 0]), make([5000, -1, 6000]),
                                            make([1200, 0, 514]), make([0, 1, 2, 3]), tables,
                                            make([0] * 3), torch.zeros(1, 1, device=DEVICE), 2)
    assert positions.tolist() == [1199, -1, 513]
    assert slots.tolist() == [5000 * 2 + 1, -1, 6000 * 2 + 1]
    before[2, 599], before[0, 256] = 5000, 6000
    assert torch.equal(tables, before), "a table changed elsewhere"
    assert torch.equal(of_rows[0, :600], before[2, :600])
    assert torch.equal(of_rows[2, :257], before[0, :257])


@pytest.mark.parametrize("chunks", [[1, 1, 1], [3, 1, 6], [1], [5]])
def test_prepare_is_its_specification(chunks):
    r, rows = random.Random(len(chunks)), len(chunks)
    lengths = [chunk + r.randrange(9) for chunk in chunks]
    starts = [0, *itertools.accumulate(chunks)]
    ids = [-1 if chunk == 1 else r.randrange(30) for chunk in chunks for _ in range(chunk)]
    new_blocks = [40 + row if chunk == 1 else -1 for row, chunk in enumerate(chunks)]
    seats, embedding = r.sample(range(5), rows), torch.randn(30, 8, device=DEVICE)
    results = []
    for function in (prepare, plain_prepare):
        state = Seats(5, 6, 30, torch.device(DEVICE))
        state.tables.copy_(torch.arange(36).view(6, 6))
        state.tokens.copy_(torch.arange(6) + 20)
        inputs = [
            torch.tensor(values, dtype=torch.int32, device=DEVICE)
            for values in (ids, seats, new_blocks, lengths, starts)
        ]
        where = (state.tables, state.tokens) if function is prepare else (state,)
        x, _, positions, slots, tables = function(*inputs, *where, embedding, 4)
        known = [row[:-(-length // 4)] for row, length in zip(tables.tolist(), lengths)]
        results.append(
            (x.tolist(), positions.tolist(), slots.tolist(), known, state.tables.tolist()))
    assert results[0] == results[1]


def test_rotation_table_agrees_with_the_decoder():
    decoder = random_decoder(TINY_QWEN3, seed=1, device=DEVICE)
    cos, _ = decoder.rotation(torch.tensor([0, 3, 63], device=DEVICE))
    table = rotation_table(decoder.frequencies, 64)
    torch.testing.assert_close(table[[0, 3, 63], :TINY_QWEN3.head_dim // 2],
                               cos[:, 0, :TINY_QWEN3.head_dim // 2])


@triton.jit
def _first_above_kernel(weight_ptr, threshold, out_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out_ptr, sample_kernels._first_above(tl.load(weight_ptr + place), threshold, place))


@pytest.mark.parametrize(
    "weights, threshold, place",
    [
        ([0, 0, 1, 2], -1e-9, 2),  # rounding may leave less than nothing
        ([0, 1, 0, 0], 1.0, 1),  # or all of it
        ([0, 1, 0, 2], 1.0, 3),
        ([1, 0, 2, 0], 2.9, 2),
        ([1, 0, 2, 0], 3.5, 2)
    ])
def test_a_token_of_weight_0_is_never_drawn(weights, threshold, place):
    out = torch.full((1,), 9, dtype=torch.int32, device=DEVICE)
    _first_above_kernel[(1,)](torch.tensor(weights, dtype=torch.float32, device=DEVICE), threshold,
                              out, SIZE=4)
    assert out.item() == place
