"""Rows that land where they belong, padding, strides, widths of every kind, and offsets past 32
bits."""

import os

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def zeros(*shape):
    return torch.zeros(shape, device=DEVICE)


def numbers(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel(), device=DEVICE).view(shape).float()


def agrees(store, k, v, slots, num_blocks=4, block_size=4):
    """Store into caches full of NaN and compare with PyTorch; how many rows were written."""
    shape = num_blocks, block_size, *k.shape[1:]
    caches = [torch.full(shape, torch.nan, dtype=k.dtype, device=DEVICE) for _ in range(4)]
    real = [(i, s) for i, s in enumerate(slots) if s >= 0]
    for i, slot in real:
        caches[2].flatten(0, 1)[slot] = k[i]
        caches[3].flatten(0, 1)[slot] = v[i]
    store(k, v, caches[0], caches[1], ints(slots))
    for name, got, expected in (("K", caches[0], caches[2]), ("V", caches[1], caches[3])):
        same = (got == expected) | (got.isnan() & expected.isnan())
        wrong = (~same.flatten(0, 1).all(dim=(1, 2))).nonzero().flatten().tolist()
        assert not wrong, f"the {name} cache is wrong in slots {wrong[:8]}, with slots {slots}"
    return len(real)


def cases():
    yield "a few tokens, in any order", """
        agrees(store, numbers(3, 2, 8), -numbers(3, 2, 8), [9, 0, 5])       # → 3
    """
    yield "one token, and none", """
        agrees(store, numbers(1, 2, 8), -numbers(1, 2, 8), [15])            # → 1
        agrees(store, numbers(0, 2, 8), -numbers(0, 2, 8), [])              # → 0
    """
    yield "padding: -1 writes nothing, and above all not the last row", """
        agrees(store, numbers(4, 2, 8), -numbers(4, 2, 8), [-1, 6, -1, 2])  # → 2
        agrees(store, numbers(2, 2, 8), -numbers(2, 2, 8), [-1, -1])        # → 0
    """
    yield "row widths that are no power of two", """
        agrees(store, numbers(3, 3, 8), -numbers(3, 3, 8), [1, 2, 3])       # → 3
        agrees(store, numbers(3, 1, 5), -numbers(3, 1, 5), [1, 2, 3])       # → 3
        agrees(store, numbers(2, 3, 20), -numbers(2, 3, 20), [7, 8])        # → 2
    """
    yield "a fused projection: K and V are slices of one tensor", """
        qkv = numbers(3, 8, 16)
        agrees(store, qkv[:, 4:6], qkv[:, 6:8], [4, 11, 0])                 # → 3
    """
    yield "K and V with different strides", """
        agrees(store, numbers(3, 8, 16)[:, 2:4], -numbers(3, 2, 16), [4, 11, 0])        # → 3
    """
    yield "heads and dimensions laid out the other way round", """
        k, v = numbers(3, 16, 2).transpose(1, 2), -numbers(2, 3, 16).transpose(0, 1)
        agrees(store, k, v, [4, 11, 0])                                     # → 3
    """
    yield "slots in 64 bits", """
        k_cache, v_cache = zeros(2, 2, 1, 2), zeros(2, 2, 1, 2)
        store(numbers(1, 1, 2), numbers(1, 1, 2), k_cache, v_cache, ints([2], torch.int64))
        k_cache.flatten(0, 1)[2].tolist()                                   # → [[1.0, 2.0]]
    """
    yield "half precision", """
        agrees(store, numbers(3, 2, 8).half(), -numbers(3, 2, 8).half(), [9, 0, 5])     # → 3
    """
    yield "inputs are left as they were", """
        k, v = numbers(3, 2, 8), -numbers(3, 2, 8)
        agrees(store, k, v, [9, 0, 5])                                      # → 3
        torch.equal(k, numbers(3, 2, 8)) and torch.equal(v, -numbers(3, 2, 8))          # → True
    """
    yield "a cache of more than 2³¹ elements", """
        k_cache = torch.empty(2**17 + 1, 16, 8, 128, dtype=torch.int8, device=DEVICE)
        v_cache = torch.empty_like(k_cache)
        row = torch.ones(1, 8, 128, dtype=torch.int8, device=DEVICE)
        slot = 2**21 + 3
        store(row * 3, row * 5, k_cache, v_cache, ints([slot]))
        bool((k_cache.view(-1, 8, 128)[slot] == 3).all())                   # → True
        bool((v_cache.view(-1, 8, 128)[slot] == 5).all())                   # → True
    """
