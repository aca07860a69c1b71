"""What the decode and the prefill kernel share: reading one tile of a context through its block table."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)      # exp(x) is exp2(x × log2 e), and exp2 is one instruction


@triton.jit
def load_tile(base, tile, length, table_ptr, block_stride, row_stride, HEAD_DIM: tl.constexpr,
              BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Rows tile × TILE … of a context of `length` tokens, as [TILE, PADDED_DIM]; zeros past its end.

        token           0   1   2   3   4   5   6   7   8  …         (BLOCK_SIZE = 3)
        token // 3      0   0   0   1   1   1   2   2   2  …         logical block
        table           7   7   7   1   1   1   4   4   4  …         physical block
        row            21  22  23   3   4   5  12  13  14  …         block × BLOCK_SIZE + token % BLOCK_SIZE

    `base` points at dimension 0 … of the KV head in row 0, [1, PADDED_DIM]. Rows past the context may hold
    anything, NaN too, and 0 × NaN is NaN: they are never loaded. Offsets are in 64 bits: a pool of K or V
    passes 2³¹ elements.
    """
    token = tile * TILE + tl.arange(0, TILE)
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < length, other=0).to(tl.int64)
    row = block * block_stride + (token % BLOCK_SIZE) * row_stride
    used = (token < length)[:, None] & (tl.arange(0, PADDED_DIM) < HEAD_DIM)[None, :]
    return tl.load(base + row[:, None], mask=used, other=0.0)


@lru_cache(maxsize=None)
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 stand in for them in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(maxsize=None)
def has_wide_shared_memory(device: torch.device) -> bool:
    """Whether a program may use over 200 KB of shared memory (Hopper and datacenter Blackwell), not about 100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
