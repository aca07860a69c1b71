"""Contexts of every length, groups of every size, NaN where nobody may read, tables that end in
rubbish."""

import os

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tensor(values):
    return torch.tensor(values, device=DEVICE)


def zeros(*shape):
    return torch.zeros(shape, device=DEVICE)


def off(paged_decode, seq_lens, heads=(4, 2), head_dim=16, block_size=4, size=1.0, seed=0):
    """The largest distance from attention over the same K/V laid out contiguously; rounded to 4
    digits."""
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    width = max(1, *(-(-n // block_size) for n in seq_lens)) + 1
    tables = torch.randperm(len(seq_lens) * width, generator=g).view(len(seq_lens), width)
    k_cache = torch.full((len(seq_lens) * width, block_size, num_kv_heads, head_dim), torch.nan)
    v_cache = k_cache.clone()
    q = size * torch.randn(len(seq_lens), num_heads, head_dim, generator=g)
    expected = torch.zeros_like(q)
    for r, n in enumerate(seq_lens):
        k = torch.randn(n, num_kv_heads, head_dim, generator=g)
        v = torch.randn(n, num_kv_heads, head_dim, generator=g)
        for p in range(n):
            k_cache[tables[r, p // block_size], p % block_size] = k[p]
            v_cache[tables[r, p // block_size], p % block_size] = v[p]
        if n:
            group = num_heads // num_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            weights = torch.softmax(torch.einsum("hd,khd->hk", q[r], k) * head_dim**-0.5, dim=-1)
            expected[r] = torch.einsum("hk,khd->hd", weights, v)
        tables[r, -(-n // block_size):] = -12345  # rubbish beyond the context
    # A slice of a wider tensor, as an engine keeps its tables.
    wide = torch.cat([tables, tables], dim=1).to(DEVICE, torch.int32)[:, :width]
    out = paged_decode(q.to(DEVICE), k_cache.to(DEVICE), v_cache.to(DEVICE), wide, ints(seq_lens),
                       head_dim**-0.5)
    assert out.shape == q.shape, (
        f"the result has the shape {list(out.shape)}, expected {list(q.shape)}")
    assert not out.isnan().any(
    ), "the result holds NaN: a row was read that the context does not own"
    return round((out.cpu() - expected).abs().max().item(), 4) + 0.0


def cases():
    yield "one request, less than a block", """
        off(paged_decode, [3])                              # → 0.0
    """
    yield "one token", """
        off(paged_decode, [1])                              # → 0.0
    """
    yield "lengths around a block and around a tile", """
        off(paged_decode, [4, 5, 8, 31, 32, 33, 64, 65])    # → 0.0
    """
    yield "requests of very different lengths", """
        off(paged_decode, [2, 97, 1, 40])                   # → 0.0
    """
    yield "a context of 0 gives zeros", """
        off(paged_decode, [5, 0, 9])                        # → 0.0
        off(paged_decode, [0])                              # → 0.0
    """
    yield "groups of 1, 2, 3 and 8 query heads", """
        off(paged_decode, [9, 4], heads=(2, 2))             # → 0.0
        off(paged_decode, [9, 4], heads=(4, 2))             # → 0.0
        off(paged_decode, [9, 4], heads=(6, 2))             # → 0.0
        off(paged_decode, [9, 4], heads=(8, 1))             # → 0.0
    """
    yield "block sizes of 1, 7 and 256", """
        off(paged_decode, [9, 40], block_size=1)            # → 0.0
        off(paged_decode, [9, 40], block_size=7)            # → 0.0
        off(paged_decode, [9, 300], block_size=256)         # → 0.0
    """
    yield "head dimensions of 32 and 64", """
        off(paged_decode, [9, 40], head_dim=32)             # → 0.0
        off(paged_decode, [9, 40], head_dim=64)             # → 0.0
    """
    yield "scores far above what exp can take", """
        off(paged_decode, [50, 7], size=500.0)              # → 0.0
    """
    yield "the scale counts", """
        k_cache, v_cache, q = zeros(1, 2, 1, 16), zeros(1, 2, 1, 16), zeros(1, 1, 16)
        k_cache[0, 0], v_cache[0, 0], q[0, 0, 0] = 1.0, 1.0, 1.0
        paged_decode(q, k_cache, v_cache, ints([[0]]), ints([2]), 1.0)[0, 0, 0].item()    # ≈ 0.7311
        paged_decode(q, k_cache, v_cache, ints([[0]]), ints([2]), 2.0)[0, 0, 0].item()    # ≈ 0.8808
    """
