"""The store kernel writes each token's K and V into its slot and touches nothing else."""

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_stored(num_tokens, num_kv_heads, head_dim, block_size, dtype=torch.float32):
    """Strided K and V, random slots, some of them −1, against a loop."""
    from paged.kernels.store import store

    generator = torch.Generator().manual_seed(0)
    num_blocks = 2 * num_tokens // block_size + 2
    fused = torch.randn(num_tokens, 3 * num_kv_heads, head_dim, generator=generator).to(
        DEVICE, dtype)
    k, v = fused[:, num_kv_heads:2 * num_kv_heads], fused[:, 2 * num_kv_heads:]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[::3] = -1
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, 7.0, dtype=dtype, device=DEVICE) for _ in "kv")
    want_k, want_v = k_cache.clone().flatten(0, 1), v_cache.clone().flatten(0, 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want_k[slot], want_v[slot] = k[token], v[token]
    store(k, v, k_cache, v_cache, slots.to(DEVICE))
    assert torch.equal(k_cache.flatten(0, 1), want_k)
    assert torch.equal(v_cache.flatten(0, 1), want_v)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 24, 4), (9, 5, 80, 3), (4, 8, 128, 16),
                                   (7, 3, 500, 17)])
def test_any_shape(shape):
    assert_stored(*shape)


def test_int32_slots_any_strides_and_no_tokens():
    from paged.kernels.store import store

    cache = torch.zeros(2, 4, 2, 8, device=DEVICE)
    k = torch.randn(8, 3, 2, device=DEVICE).permute(1, 2, 0)  # head_dim is not the fastest
    v = torch.randn(3, 2, 8, device=DEVICE)
    store(k, v, cache, cache.clone(), torch.tensor([6, 0, 3], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache.flatten(0, 1)[[6, 0, 3]], k)
    store(k[:0], v[:0], cache, cache.clone(), torch.tensor([], dtype=torch.long, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(dtype):
    assert_stored(3000, 8, 128, 16, dtype)
    assert_stored(1500, 3, 80, 5, dtype)
