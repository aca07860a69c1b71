"""Store new K and V into the paged cache: one Triton kernel.

    token t ──► slot[t] = block × block_size + offset ──► that row of the cache,
                                                          num_kv_heads × head_dim long
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import fp8_scale, largest, launch, raw, scale_pointers, to_fp8


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


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_store_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, num_tokens, k_token,
                      k_head, k_dim, v_token, v_head, v_dim, NUM_KV_HEADS: tl.constexpr,
                      HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      GAP: tl.constexpr, ROWS: tl.constexpr):
    # A row is one head of one token: it has one scale.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // NUM_KV_HEADS).to(tl.int64), row % NUM_KV_HEADS
    dim = tl.arange(0, PADDED_DIM)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    keep = kept[:, None] & (dim < HEAD_DIM)[None, :]
    at = slot * (NUM_KV_HEADS * HEAD_DIM) + slot // BLOCK_SIZE * GAP + head * HEAD_DIM
    k = k_ptr + (token * k_token + head * k_head)[:, None] + dim[None, :] * k_dim
    v = v_ptr + (token * v_token + head * v_head)[:, None] + dim[None, :] * v_dim
    _store_quantized(k, k_cache_ptr, at, slot, head, kept, keep, NUM_KV_HEADS * HEAD_DIM,
                     BLOCK_SIZE, GAP)
    _store_quantized(v, v_cache_ptr, at, slot, head, kept, keep, NUM_KV_HEADS * HEAD_DIM,
                     BLOCK_SIZE, GAP)


@triton.jit
def _store_quantized(source, cache_ptr, at, slot, head, kept, keep, ROW: tl.constexpr,
                     BLOCK_SIZE: tl.constexpr, GAP: tl.constexpr):
    x = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    scale, inverse = fp8_scale(largest(x, 1))
    tl.store(scale_pointers(cache_ptr, head, slot, ROW, BLOCK_SIZE, GAP), scale, mask=kept)
    dim = tl.arange(0, x.shape[1])
    tl.store(cache_ptr + at[:, None] + dim[None, :], to_fp8(x * inverse[:, None]), mask=keep)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
          slots: torch.Tensor) -> None:
    """Write K and V of new tokens into their slots; a token with slot −1 is skipped.

    k, v: [tokens, num_kv_heads, head_dim], any strides (slices of a fused projection, for example).
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], a layer of a PagedKVCache.
    slots: [tokens], int32 or int64, on the same device. Nothing here waits for the GPU, so slots
    are not checked.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    slots = slots.contiguous()
    (k_cache, gap), (v_cache, _) = raw(k_cache), raw(v_cache)
    if gap:
        padded = triton.next_power_of_2(head_dim)
        rows = max(1, 1024 // padded)
        launch(_fp8_store_kernel, (triton.cdiv(num_tokens * num_kv_heads, rows), 1, 1),
               (k, v, k_cache, v_cache, slots), (num_tokens,), (*k.stride(), *v.stride()),
               (num_kv_heads, head_dim, padded, k_cache.shape[1], gap, rows), num_warps=4)
        return
    columns = min(1024, triton.next_power_of_2(num_kv_heads * head_dim))
    tokens = 1 if num_tokens < 1024 else 4096 // columns
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_kv_heads * head_dim, columns), 1)
    launch(_store_kernel, grid, (k, v, k_cache, v_cache, slots), (num_tokens,),
           (*k.stride(), *v.stride()), (num_kv_heads, head_dim, tokens, columns), num_warps=4)
