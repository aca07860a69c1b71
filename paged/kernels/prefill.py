"""Prefill attention: any number of new tokens a request over its paged context, in one Triton
kernel.

The query rows of a request are its new tokens times the query heads that share a KV head, so that
one load of K and V serves them all:

    row:     0        1        2        3        4        5      …        (GROUP = 2)
    token:   0        0        1        1        2        2      …        row // GROUP
    head:    0        1        0        1        0        1      …        row % GROUP

A program takes up to ROWS of them and walks over the context in tiles of TILE tokens. The queries
are the last tokens of the context; a query at position p sees keys 0 to p:

    keys ──►   0 … context already cached …│ new tokens
    query 0    ████████████████████████████│█
    query 1    ████████████████████████████│██           full tiles first, without a mask;
    query 2    ████████████████████████████│███          then the few that cross the diagonal

Algorithm: FlashAttention-2 (Dao, 2023) over block tables (PagedAttention, Kwon et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.device import Card, device_properties
from paged.kernels.common import LOG2_E, launch, load_numbers, load_scales, raw, tile_slots


@triton.jit
def _attend(q, m, l, acc, first, last, positions, length, table_ptr, k_ptr, v_ptr, kv_head, scale,
            ROW: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, GAP: tl.constexpr, CONVERTS: tl.constexpr, TILE: tl.constexpr,
            MASKED: tl.constexpr):
    """Online softmax over tiles first to last − 1: running maximum m, running sum l, weighted
    values acc."""
    inside = kv_head * HEAD_DIM + tl.arange(0, PADDED_DIM)[None, :]
    slots = tile_slots(first, length, table_ptr, BLOCK_SIZE, TILE)
    for tile in range(first, last):
        k = load_numbers(k_ptr + inside, slots, q.dtype, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP,
                         CONVERTS)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if GAP:
            scores *= load_scales(k_ptr, kv_head, slots, ROW, BLOCK_SIZE, GAP, CONVERTS)[None, :]
        if MASKED:
            token = tile * TILE + tl.arange(0, TILE)
            scores = tl.where(token[None, :] <= positions[:, None], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        if MASKED:
            m_new = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that sees nothing yet
        p = tl.exp2(scores * scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = load_numbers(v_ptr + inside, slots, q.dtype, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP,
                         CONVERTS)
        if GAP:
            p *= load_scales(v_ptr, kv_head, slots, ROW, BLOCK_SIZE, GAP, CONVERTS)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
        slots = tile_slots(tile + 1, length, table_ptr, BLOCK_SIZE,
                           TILE)  # asked for one tile ahead
    return m, l, acc


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _prefill_kernel(q_ptr, k_ptr, v_ptr, out_ptr, block_tables_ptr, seq_lens_ptr,
                    query_start_loc_ptr, scale, num_requests, table_stride, q_stride,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                    PADDED_DIM: tl.constexpr, PADDED_REQUESTS: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                    MIN_QUERIES: tl.constexpr, GAP: tl.constexpr, CONVERTS: tl.constexpr):
    TOKENS: tl.constexpr = ROWS // GROUP
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    # Every request needs so many programs a KV head. Its last program has the longest context and
    # is given out first, so that short ones fill the gaps at the end.
    index = tl.arange(0, PADDED_REQUESTS)
    starts = tl.load(query_start_loc_ptr + index, mask=index < num_requests, other=0)
    queries = tl.load(query_start_loc_ptr + index + 1, mask=index < num_requests, other=0) - starts
    programs = tl.where(queries >= MIN_QUERIES, (queries + TOKENS - 1) // TOKENS, 0)
    place = tl.sum(programs, 0) - 1 - tl.program_id(0) // NUM_KV_HEADS
    if place < 0:
        return
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.sum((tl.cumsum(programs, 0) <= place).to(tl.int32), 0)
    first_token = (place - tl.sum(tl.where(index < request, programs, 0), 0)) * TOKENS

    start = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - start
    length = tl.load(seq_lens_ptr + request)
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, PADDED_DIM)
    real = ((token < num_queries) & (row < TOKENS * GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    line = (start + token).to(tl.int64)
    q = tl.load(q_ptr + (line * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=real,
                other=0.0)

    positions = length - num_queries + token
    first_position = length - num_queries + first_token
    full = tl.maximum(first_position + 1, 0) // TILE  # tiles that every row sees whole
    seen = tl.cdiv(tl.minimum(length, first_position + TOKENS), TILE)  # tiles that some row sees
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    scale *= LOG2_E
    m, l, acc = _attend(q, m, l, acc, 0, full, positions, length, table_ptr, k_ptr, v_ptr, kv_head,
                        scale, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP, CONVERTS, TILE, False)
    m, l, acc = _attend(q, m, l, acc, full, seen, positions, length, table_ptr, k_ptr, v_ptr,
                        kv_head, scale, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP, CONVERTS, TILE,
                        True)
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]  # an empty context gives zeros
    tl.store(out_ptr + ((line * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + dim[None, :],
             acc.to(out_ptr.dtype.element_ty), mask=real)


def launch_shape(card: Card, dtype: torch.dtype, head_dim: int,
                 num_tokens: int) -> tuple[int, int, dict]:
    """Query rows a program, tokens a tile, Triton's options; measured on an H200, elsewhere what
    fits.

    A short step has few rows: small programs then, so that more of the card has work.
    """
    if dtype == torch.float32:
        return 32, 16 if head_dim > 128 else 32, dict(num_warps=8, num_stages=2)
    if card.capability < 8:  # what is on its way takes registers
        return 32 if head_dim > 128 else 64, 16, dict(num_warps=8, num_stages=1)
    if head_dim > 128:
        return 64, 32, dict(num_warps=4, num_stages=2)
    if card.shared_memory < 200 * 1024:
        return 64, 64, dict(num_warps=4, num_stages=2)
    if num_tokens <= 128:
        return 16, 128, dict(num_warps=4, num_stages=3)
    if num_tokens <= 2048:
        return 64, 64, dict(num_warps=4, num_stages=3)
    # Few registers: a multiprocessor holds two programs, one computes, one waits.
    return 128, 64, dict(num_warps=8, num_stages=2, maxnreg=128)


def prefill(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
            block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
            scale: float, out: torch.Tensor, min_queries: int = 1) -> None:
    """Write into `out` the attention of every request with at least `min_queries` queries, and of
    no other.

    q, out: [N, num_heads, head_dim], the heads of a token side by side; caches: a layer of a
    PagedKVCache, [num_blocks, block_size, num_kv_heads, head_dim]; block_tables: [requests,
    max_blocks], seq_lens: [requests], query_start_loc: [requests + 1], int32 on the GPU. A context
    of 0 tokens gives zeros.
    """
    (num_tokens, num_heads, head_dim), num_requests = q.shape, len(seq_lens)
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    (k_cache, gap), (v_cache, _) = raw(k_cache), raw(v_cache)
    card = device_properties(q.device)
    rows, tile, options = launch_shape(card, q.dtype, head_dim, num_tokens)
    rows = max(rows, triton.next_power_of_2(group))
    # A program for each `rows // group` tokens of a request; the GPU knows how many, the CPU an
    # upper bound.
    most = num_tokens // (rows // group) + min(num_requests, num_tokens)
    launch(_prefill_kernel, (most * num_kv_heads, 1, 1),
           (q, k_cache, v_cache, out, block_tables, seq_lens, query_start_loc),
           (scale, num_requests, block_tables.stride(0)), (q.stride(0),),
           (num_kv_heads, group, head_dim, max(
               16, triton.next_power_of_2(head_dim)), max(64, triton.next_power_of_2(num_requests)),
            block_size, rows, tile, min_queries, gap, card.converts_fp8), **options)
