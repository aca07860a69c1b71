"""Store new K and V into the paged cache: one Triton kernel.

    token t ──► slot[t] = block × block_size + offset ──► that row of the cache,
                                                          num_kv_heads × head_dim long
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import launch


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
        k_ptr,
        v_ptr,
        k_cache_ptr,
        v_cache_ptr,
        slots_ptr,
        num_tokens,
        k_token,
        k_head,
        k_dim,
        v_token,
        v_head,
        v_dim,  # strides of the new K and V
        NUM_KV_HEADS: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        TOKENS: tl.constexpr,
        COLUMNS: tl.constexpr):
    # Column c of a row is value c % HEAD_DIM of head c // HEAD_DIM:
    #
    #     |  head 0: d = 0 1 2 …  |  head 1: d = 0 1 2 …  | … | masked up to a power of two |
    #
    # In the cache a row is contiguous, so there the column itself is the offset.
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    head, dim = column // HEAD_DIM, column % HEAD_DIM

    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    row = slot * (NUM_KV_HEADS * HEAD_DIM)  # 64 bits: pools pass 2³¹ elements
    keep = (slot >= 0) & (column < NUM_KV_HEADS * HEAD_DIM)  # slot −1 is padding: write nothing
    k = tl.load(k_ptr + token * k_token + head * k_head + dim * k_dim, mask=keep)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim * v_dim, mask=keep)
    tl.store(k_cache_ptr + row + column, k, mask=keep)
    tl.store(v_cache_ptr + row + column, v, mask=keep)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          slots: torch.Tensor) -> None:
    """Write K and V of new tokens into their slots; a token with slot −1 is skipped.

    k, v: [tokens, num_kv_heads, head_dim], any strides (slices of a fused projection, for example).
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous. slots: [tokens],
    int32 or int64, on the same device. Nothing here waits for the GPU, so slots are not checked.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    slots = slots.contiguous()
    columns = min(1024, triton.next_power_of_2(num_kv_heads * head_dim))
    tokens = 1 if num_tokens < 1024 else 4096 // columns
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_kv_heads * head_dim, columns), 1)
    launch(_store_kernel, grid, (k, v, k_cache, v_cache, slots), (num_tokens,),
           (*k.stride(), *v.stride()), (num_kv_heads, head_dim, tokens, columns), num_warps=4)
