"""Caches full of NaN, and what a cache makes of the rows that are written to it."""

from __future__ import annotations

import torch

from paged.fp8 import FP8, dequantize, quantize
from paged.kv_cache import PagedKVCache


def fill_with_nan(kv: PagedKVCache) -> PagedKVCache:
    """Every number of the cache NaN, scales included: what is read must have been written."""
    if kv.spec.dtype == FP8:
        kv.data.fill_(0xFF)  # NaN as e4m3, and four of them NaN as float32
    else:
        kv.data.fill_(float("nan"))
    return kv


def nan_cache(num_layers=1, num_blocks=4, block_size=4, num_kv_heads=2, head_dim=3,
              dtype=torch.float32, device="cpu") -> PagedKVCache:
    return fill_with_nan(
        PagedKVCache(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, device))


def kept(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [tokens, num_kv_heads, head_dim] as they come back out of a cache of that dtype."""
    return dequantize(*quantize(rows)) if dtype == FP8 else rows.to(dtype)


def one_step_apart(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rows out of an FP8 cache, written from numbers that differ by rounding: the same, but where
    that decides between two neighbours, which few numbers are."""
    largest = want.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(got.isnan(), want.isnan(), rtol=0, atol=0)
    got, want = (x.nan_to_num() for x in (got, want))
    error = (got - want).abs()
    assert (error <= want.abs() / 7 + largest.nan_to_num() * 2**-16).all(), error.max()
    flipped = error > want.abs() * 1e-3
    assert flipped.sum() <= max(2, 0.01 * flipped.numel()), f"{flipped.sum()} differ"
