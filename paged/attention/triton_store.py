"""Store new K and V into the paged cache: one Triton kernel.

    token t ──► slot[t] = block × block_size + offset ──► cache[block, offset, head, :]

Each program copies TOKENS rows of up to COLUMNS values, a row being all heads of a token laid side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, num_tokens,
                  k_token, k_head, k_dim, v_token, v_head, v_dim,          # strides of the new K and V
                  k_block, k_row, v_block, v_row,                          # strides of the caches
                  NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                  TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    # Column c of a row is value c % HEAD_DIM of head c // HEAD_DIM:
    #
    #     |  head 0: d = 0 1 2 …  |  head 1: d = 0 1 2 …  | … | masked up to a power of two |
    #
    # In the cache a row is contiguous, so there the column itself is the offset.
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    head, dim = column // HEAD_DIM, column % HEAD_DIM

    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    keep = (slot >= 0) & (column < NUM_KV_HEADS * HEAD_DIM)                # slot −1 is padding: write nothing
    block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE                     # 64 bits: pools pass 2³¹ elements

    k = tl.load(k_ptr + token * k_token + head * k_head + dim * k_dim, mask=keep)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim * v_dim, mask=keep)
    tl.store(k_cache_ptr + block * k_block + row * k_row + column, k, mask=keep)
    tl.store(v_cache_ptr + block * v_block + row * v_row + column, v, mask=keep)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          slots: torch.Tensor) -> None:
    """Write K and V of new tokens into their slots; a token with slot −1 is skipped.

    k, v: [tokens, num_kv_heads, head_dim], any strides (slices of a fused projection, for example).
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], rows contiguous.
    slots: [tokens], int32 or int64, on the same device. Nothing here waits for the GPU.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    width = num_kv_heads * head_dim
    columns = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 4096 // columns) if num_tokens >= 1024 else 1
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(width, columns))
    _store_kernel[grid](k, v, k_cache, v_cache, slots, num_tokens, *k.stride(), *v.stride(),
                        *k_cache.stride()[:2], *v_cache.stride()[:2],
                        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
                        TOKENS=tokens, COLUMNS=columns, num_warps=4)
