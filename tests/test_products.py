"""The products of few tokens, held to PyTorch: every epilogue, split tiles, odd shapes, padding.

Protects the path that most decode steps of a small batch take; the whole decoder is held in
test_kernels.py.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from paged.fp8 import FP8
from paged.kernels import products
from paged.kernels.elementwise import rotation_table
from paged.kernels.products import product, qkv_product
from paged.kv_cache import take
from tests.caches import kept, nan_cache, one_step_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = dict(atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("num_tokens, width, outputs", [(1, 44, 9), (17, 256, 64), (40, 70, 130)])
def test_product(num_tokens, width, outputs, split, monkeypatch):
    monkeypatch.setattr(products, "tile_shape", lambda kind, tokens: (32, 32, split, 2, 4))
    x, residual = (torch.randn(num_tokens, n, device=DEVICE) for n in (width, outputs))
    weight = torch.randn(outputs, width, device=DEVICE)
    before = torch.rand(num_tokens, 5, device=DEVICE)  # five parts of the sums of squares
    scale = torch.rsqrt(before.sum(1, keepdim=True) / width + 1e-5)
    torch.testing.assert_close(product(x, weight), x @ weight.T, **CLOSE)
    torch.testing.assert_close(product(x, weight, 1e-5, before), x @ weight.T * scale, **CLOSE)
    total, squares = product(x, weight, residual=residual)
    torch.testing.assert_close(total, x @ weight.T + residual, **CLOSE)
    torch.testing.assert_close(squares.sum(1), total.square().sum(1), atol=1e-2, rtol=1e-4)
    both = torch.randn(2 * outputs, width, device=DEVICE) / 8
    gate, up = (x @ both.T * scale).split(outputs, 1)
    torch.testing.assert_close(product(x, both, 1e-5, before, silu=True),
                               F.silu(gate) * up, **CLOSE)


@pytest.mark.parametrize("cache, split", [(torch.float32, 1), (torch.float32, 3), (FP8, 1)])
@pytest.mark.parametrize("head_dim, num_tokens, norm, bias", [(10, 5, True, False),
                                                              (64, 33, False, True),
                                                              (80, 17, True, True),
                                                              (128, 3, True, False),
                                                              (256, 18, False, False)])
def test_qkv_product(head_dim, num_tokens, norm, bias, split, cache, monkeypatch):
    monkeypatch.setattr(products, "tile_shape", lambda kind, tokens: (16, 32, split, 2, 4))
    width, heads, kv_heads, half = 64, 4, 2, head_dim // 2
    x = torch.randn(num_tokens, width, device=DEVICE)
    rows = (heads + 2 * kv_heads) * head_dim
    weight, shift = torch.randn(rows, width, device=DEVICE) / 8, torch.randn(
        rows, device=DEVICE) if bias else None
    q_norm, k_norm = torch.randn(2, head_dim, device=DEVICE) if norm else (None, None)
    squares = torch.rand(num_tokens, 3, device=DEVICE) * width
    rotation = rotation_table(10_000**-(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim), 50)
    positions = torch.randint(50, (num_tokens,), dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(40, device=DEVICE)[:num_tokens]
    x[-1], positions[-1], slots[-1] = float("nan"), -1, -1  # a row of padding
    kv = nan_cache(1, 10, 4, kv_heads, head_dim, cache, DEVICE)
    q = qkv_product(x, squares, weight, shift, positions, slots, rotation, q_norm, k_norm, 1e-5,
                    kv.k[0], kv.v[0], heads)

    want = x @ weight.T * torch.rsqrt(squares.sum(1, keepdim=True) / width + 1e-5) + (shift if bias
                                                                                      else 0)
    want = want.view(num_tokens, -1, head_dim)[:-1]
    turned, v = want[:, :heads + kv_heads], want[:, heads + kv_heads:]
    if norm:
        turned = torch.cat([
            F.rms_norm(part, (head_dim,), weight, 1e-5)
            for part, weight in ((turned[:, :heads], q_norm), (turned[:, heads:], k_norm))
        ], 1)
    cos, sin = rotation[positions[:-1].long()][:, None].split(half, -1)
    a, b = turned.split(half, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    torch.testing.assert_close(q[:-1], turned[:, :heads], **CLOSE)
    rows = torch.stack(
        [take(part[0], torch.arange(10, device=DEVICE)).flatten(0, 1) for part in (kv.k, kv.v)])
    close = one_step_apart if cache == FP8 else partial(torch.testing.assert_close, **CLOSE)
    close(rows[0, slots[:-1]], kept(turned[:, heads:], cache))
    close(rows[1, slots[:-1]], kept(v, cache))
    others = [slot for slot in range(40) if slot not in slots[:-1].tolist()]
    assert rows[:, others].isnan().all(), "padding wrote to the cache"


def test_the_scale_behind_the_product_is_the_norm_before_it():
    x, weight = torch.randn(3, 96, device=DEVICE), torch.randn(20, 96, device=DEVICE)
    _, squares = product(torch.randn(3, 8, device=DEVICE), torch.zeros(96, 8, device=DEVICE),
                         residual=x)
    want = F.rms_norm(x, (96,), eps=1e-5) @ weight.T
    torch.testing.assert_close(product(x, weight, 1e-5, squares), want, **CLOSE)


def test_a_card_that_is_full_needs_no_split(monkeypatch):
    monkeypatch.setattr(products, "tile_shape", lambda kind, tokens: (16, 32, 4, 2, 4))
    monkeypatch.setattr(products, "MOST_SPLIT", 11)  # 3 tiles × 4 parts are more
    x, weight = torch.randn(5, 128, device=DEVICE), torch.randn(130, 128, device=DEVICE)
    torch.testing.assert_close(product(x, weight), x @ weight.T, **CLOSE)


def test_a_split_tile_gives_the_same_bits_every_time(monkeypatch):
    monkeypatch.setattr(products, "tile_shape", lambda kind, tokens: (16, 32, 4, 2, 4))
    x, weight = torch.randn(5, 512, device=DEVICE), torch.randn(70, 512, device=DEVICE)
    first = product(x, weight)
    assert all(torch.equal(product(x, weight), first) for _ in range(5))


def test_nothing_is_written_behind_the_last_row(monkeypatch):
    """Widths that are no multiple of a tile: what lies behind the buffer stays as it is."""
    kept, empty = [], torch.empty

    def with_a_tail(*shape, **options):
        flat = torch.full((math.prod(shape) + 70,), 77, **options)
        kept.append(flat[-70:])
        return flat[:-70].view(shape)

    monkeypatch.setattr(torch, "empty", with_a_tail)
    for outputs in (9, 65):
        x, weight = torch.randn(3, 44, device=DEVICE), torch.randn(outputs, 44, device=DEVICE)
        residual = torch.randn(3, outputs, device=DEVICE)
        product(x, weight)
        product(x, weight, residual=residual)
        product(x, torch.cat((weight, weight)), 1e-5, torch.ones(3, 1, device=DEVICE), silu=True)
    monkeypatch.setattr(torch, "empty", empty)
    assert len(kept) > 6 and all((tail == 77).all() for tail in kept)
