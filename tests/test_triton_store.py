"""The store kernel writes each token's K and V into its slot and touches nothing else."""

import pytest
import torch

from paged.fp8 import FP8
from paged.kv_cache import PagedKVCache, put, take

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CACHES = pytest.mark.parametrize("cache", [None, FP8], ids=["plain", "fp8"])


def assert_stored(num_tokens, num_kv_heads, head_dim, block_size, dtype=torch.float32, cache=None):
    """Strided K and V, random slots, some of them −1, against a loop; every other byte as it
    was."""
    from paged.kernels.store import store

    generator = torch.Generator().manual_seed(0)
    num_blocks = 2 * num_tokens // block_size + 2
    fused = torch.randn(num_tokens, 3 * num_kv_heads, head_dim, generator=generator).to(
        DEVICE, dtype)
    k, v = fused[:, num_kv_heads:2 * num_kv_heads], fused[:, 2 * num_kv_heads:]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[::3] = -1
    got, want = (PagedKVCache(1, num_blocks, block_size, num_kv_heads, head_dim, cache or dtype,
                              DEVICE) for _ in range(2))
    got.data.fill_(7), want.data.fill_(7)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for part, rows in ((want.k[0], k), (want.v[0], v)):
                put(part, torch.tensor([slot], device=DEVICE), rows[token:token + 1])
    store(k, v, got.k[0], got.v[0], slots.to(DEVICE))
    assert torch.equal(got.data, want.data)


@CACHES
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 24, 4), (9, 5, 80, 3), (4, 8, 128, 16),
                                   (7, 3, 500, 17)])
def test_any_shape(shape, cache):
    assert_stored(*shape, cache=cache)


def test_every_number_is_rounded_as_pytorch_rounds_it():
    """Ties, numbers below 2⁻⁶, the largest, both zeros, rows of zeros, rows beyond all scales."""
    from paged.kernels.store import store

    exact = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()  # every FP8 from 0 to 448
    between = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, exact.nextafter(torch.tensor(1e9))))
    rows = torch.stack((between, -between, torch.zeros_like(between), -torch.zeros_like(between)))
    rows[:, -1] = 448.0  # so that the scale is 1
    odd = torch.randn(6, between.numel()) * torch.tensor([1e-44, 1e-38, 1e-20, 1.0, 1e6, 1e37
                                                          ])[:, None]
    rows = torch.cat((rows, torch.zeros_like(rows[:2]), odd))[:, None].to(DEVICE)
    got, want = (PagedKVCache(1, 3, 4, 1, rows.shape[-1], FP8, DEVICE) for _ in range(2))
    got.data.fill_(7), want.data.fill_(7)
    slots = torch.arange(len(rows), device=DEVICE)
    for part in (want.k[0], want.v[0]):
        put(part, slots, rows)
    store(rows, rows, got.k[0], got.v[0], slots)
    assert torch.equal(got.data, want.data)
    back = take(got.k[0], slots // 4, slots % 4)
    torch.testing.assert_close(back[:2, 0, :127].cpu(), torch.stack((exact, -exact)), rtol=0,
                               atol=0)
    error = (back - rows).abs() / rows.abs().amax(-1, keepdim=True).clamp(min=1e-38)
    assert error.max() <= 1 / 16 + 1e-3


def test_int32_slots_any_strides_and_no_tokens():
    from paged.kernels.store import store

    cache = torch.zeros(2, 4, 2, 8, device=DEVICE)
    k = torch.randn(8, 3, 2, device=DEVICE).permute(1, 2, 0)  # head_dim is not the fastest
    v = torch.randn(3, 2, 8, device=DEVICE)
    store(k, v, cache, cache.clone(), torch.tensor([6, 0, 3], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache.flatten(0, 1)[[6, 0, 3]], k)
    store(k[:0], v[:0], cache, cache.clone(), torch.tensor([], dtype=torch.long, device=DEVICE))


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(dtype, cache):
    assert_stored(3000, 8, 128, 16, dtype, cache)
    assert_stored(1500, 3, 80, 5, dtype, cache)
