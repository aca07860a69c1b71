"""The fused kernels and the decoder made of them, held to the plain decoder and to PyTorch.

Protects the fast path: same residual stream, same K and V in the same slots, padding that touches
    nothing.
"""

import pytest
import torch
import torch.nn.functional as F

from paged import PagedKVCache, paged_attention
from paged.kernels.fused import prepare, rotation_table, sample, silu_mul
from paged.models.decoder import Decoder, random_decoder
from paged.models.fused_decoder import FusedDecoder
from tests.small_models import TINY_MODELS, TINY_QWEN3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def unpacked(config, monkeypatch, dtype=torch.float32):
    """A random decoder whose weights stay in rows, as they do on a GPU."""
    monkeypatch.setattr(Decoder, "pack", lambda self: self)
    return random_decoder(config, seed=1, device=DEVICE, dtype=dtype)


def test_silu_mul():
    gate_up, x = torch.randn(3, 2 * 92, device=DEVICE), torch.randn(3, 44, device=DEVICE)
    torch.testing.assert_close(silu_mul(gate_up, None, 1e-5),
                               F.silu(gate_up[:, :92]) * gate_up[:, 92:])
    scaled = gate_up * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(silu_mul(gate_up, x, 1e-5), F.silu(scaled[:, :92]) * scaled[:, 92:])


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("num_tokens, narrow", [(1, 16), (5, 16), (5, 0)])
def test_fused_decoder_equals_the_plain_one(name, num_tokens, narrow, monkeypatch):
    config = TINY_MODELS[name]
    decoder = unpacked(config, monkeypatch)
    caches = [
        PagedKVCache(config.num_layers, 4, 4, config.num_kv_heads, config.head_dim, device=DEVICE)
        for _ in range(2)
    ]
    for kv in caches:
        kv.data.fill_(float("nan"))
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
    fast = FusedDecoder(decoder, caches[1], 64, narrow)
    x = F.embedding(torch.cat((ids, pad.clamp(min=0))), decoder.embedding)
    x = fast(
        x,
        x.square().sum(1, keepdim=True), torch.cat((positions, pad)), torch.cat((slots, pad)),
        lambda layer, q: torch.cat(
            (fused(layer, q[:num_tokens]), torch.zeros_like(q[num_tokens:]))))
    torch.testing.assert_close(fast.logits(x)[:num_tokens], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[1].data, caches[0].data, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert caches[1].data[:, :, :2].isnan().all(), "padding wrote to the cache"


def test_greedy_sampling_is_argmax_and_nan_is_reported():
    logits = torch.randn(6, 9_000, device=DEVICE)
    logits[1] = float("nan")
    logits[3, 5_000], logits[4, 8_000] = float("nan"), float("inf")
    logits[5] = float("-inf")
    logits[2, 7] = logits[2, 8_900] = 50.0  # of equals, the first
    seats = torch.tensor([2, 0, 1, 3, 4, 5], dtype=torch.int32, device=DEVICE)
    tokens, both = (torch.full(size, 99, dtype=torch.int32, device=DEVICE)
                    for size in ((7,), (2, 6)))
    zeros, out, turn = torch.zeros(7, device=DEVICE), both[1], torch.ones(
        1, dtype=torch.int32, device=DEVICE)
    sample(logits, seats, seats, zeros, zeros.long(), tokens, both, turn)
    assert (both[0] == 99).all() and out.tolist() == [logits[0].argmax().item(), -1, 7, -1, -1, -1]
    assert tokens.tolist() == [0, 7, out[0].item(), 0, 0, 0, 99]
    sample(logits, seats, seats, zeros + 1, zeros.long(), tokens, both, turn)
    assert [token == -1 for token in out.tolist()] == [False, True, False, True, True, True]


def test_sampling_follows_the_probabilities_and_the_seed():
    rows = 4000 if DEVICE == "cuda" else 50  # the interpreter is slow
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    logits = (probabilities.log() * 0.7).repeat(rows, 1).to(DEVICE)
    seats = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    lengths = torch.full_like(seats, 5)
    temperatures, seeds = torch.full((rows,), 0.7,
                                     device=DEVICE), torch.arange(rows, device=DEVICE) * 7919
    draws = []
    for order in (seats, seats.flip(0), seats):
        out, tokens = torch.empty_like(seats), torch.empty_like(seats)
        sample(logits, order, lengths, temperatures, seeds, tokens, out[None], seats[:1])
        draws.append(tokens)
    assert torch.equal(draws[0], draws[1]) and torch.equal(
        draws[0], draws[2]), "a row's draw depends on its place"
    share = torch.bincount(draws[0].long().cpu(), minlength=4) / rows
    assert (share - probabilities).abs().max() < 4 * (0.25 / rows)**0.5
    sample(logits, seats, lengths + 1, temperatures, seeds, tokens, out[None], seats[:1])
    assert not torch.equal(tokens, draws[0]), "the next position draws the same again"


def test_prepare():
    tables = torch.tensor([[3, 1, 0], [2, 9, 9], [0, 0, 0]], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([70, 71, 0], dtype=torch.int32, device=DEVICE)
    ids, positions, rows = ([-1, 5, 6, 0], [4, 1, 2, -1], [0, 1, 1, 0])
    seats, new_blocks = [1, 0], [8, -1]  # the request in seat 1 has its second block, 8, now

    def make(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    embedding = torch.randn(80, 12, device=DEVICE)
    x, squares, slots, of_rows = prepare(make(ids), make(positions), make(rows), make(seats),
                                         make(new_blocks), make([5, 3]), tables, tokens, embedding,
                                         4)
    assert torch.equal(x, embedding[[71, 5, 6, 0]])
    torch.testing.assert_close(squares, x.square().sum(1, keepdim=True))
    assert slots.tolist() == [8 * 4, 3 * 4 + 1, 3 * 4 + 2, -1]
    assert tables.tolist() == [[3, 1, 0], [2, 8, 9], [0, 0, 0]]
    assert of_rows.shape == (2, 3) and of_rows[0, :2].tolist() == [
        2, 8
    ] and of_rows[1, :1].tolist() == [3]


def test_prepare_copies_tables_longer_than_a_program_takes_at_once():
    tables = torch.randint(1000, (3, 700), dtype=torch.int32, device=DEVICE)
    before, lengths = tables.clone(), [1200, 0, 514]

    def make(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    _, _, slots, of_rows = prepare(make([-1] * 3), make([1199, -1, 513]), make([0, 1, 2]),
                                   make([2, 1, 0]), make([5000, -1, 6000]), make(lengths), tables,
                                   make([0] * 3), torch.zeros(1, 1, device=DEVICE), 2)
    assert slots.tolist() == [5000 * 2 + 1, -1, 6000 * 2 + 1]
    before[2, 599], before[0, 256] = 5000, 6000
    assert torch.equal(tables, before), "a table changed elsewhere"
    assert torch.equal(of_rows[0, :600], before[2, :600]) and torch.equal(
        of_rows[2, :257], before[0, :257])


def test_rotation_table_agrees_with_the_decoder(monkeypatch):
    decoder = unpacked(TINY_QWEN3, monkeypatch)
    cos, _ = decoder.rotation(torch.tensor([0, 3, 63], device=DEVICE))
    table = rotation_table(decoder.frequencies, 64)
    torch.testing.assert_close(table[[0, 3, 63], :TINY_QWEN3.head_dim // 2],
                               cos[:, 0, :TINY_QWEN3.head_dim // 2])
