"""Prefill attention: any number of new tokens a request over its paged context, in one Triton kernel.

The query rows of a request are its new tokens times the query heads that share a KV head, so that one load of K
and V serves them all:

    row:     0        1        2        3        4        5      …        (GROUP = 2)
    token:   0        0        1        1        2        2      …        row // GROUP
    head:    0        1        0        1        0        1      …        row % GROUP

A program takes up to ROWS of them and walks over the context in tiles of TILE tokens. The queries are the last
tokens of the context; a query at position p sees keys 0 to p:

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

from paged.attention.triton_tile import LOG2_E, has_wide_shared_memory, load_tile


@triton.jit
def _weigh(scores, m, l, tile, positions, scale, TILE: tl.constexpr, MASKED: tl.constexpr):
    """One step of online softmax: the weights p, the correction alpha, and the new running maximum m and sum l."""
    if MASKED:
        token = tile * TILE + tl.arange(0, TILE)
        scores = tl.where(token[None, :] <= positions[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    if MASKED:
        m_new = tl.where(m_new == float("-inf"), 0.0, m_new)           # a row that sees nothing yet
    p = tl.exp2(scores * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _prefill_kernel(q_ptr, k_ptr, v_ptr, out_ptr, block_tables_ptr, seq_lens_ptr, query_start_loc_ptr,
                    scale, num_requests, table_stride, q_token, q_head, k_block, k_row, k_head,
                    v_block, v_row, v_head, out_token, out_head,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MIN_QUERIES: tl.constexpr,
                    PADDED_DIM: tl.constexpr, PADDED_REQUESTS: tl.constexpr):
    TOKENS: tl.constexpr = ROWS // GROUP
    # Every request needs so many programs a KV head; the last programs of the line, those with the longest
    # contexts, are given out first, so that short ones fill the gaps at the end.
    index = tl.arange(0, PADDED_REQUESTS)
    valid = index < num_requests
    starts = tl.load(query_start_loc_ptr + index, mask=valid, other=0)
    queries = tl.load(query_start_loc_ptr + index + 1, mask=valid, other=0) - starts
    programs = tl.where(queries >= MIN_QUERIES, (queries + TOKENS - 1) // TOKENS, 0)
    ends = tl.cumsum(programs, 0)
    place = tl.sum(programs, 0) - 1 - tl.program_id(0) // NUM_KV_HEADS
    if place < 0:
        return
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.sum((ends <= place).to(tl.int32), 0)
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
    q = tl.load(q_ptr + (line * q_token + head * q_head)[:, None] + dim[None, :], mask=real, other=0.0)

    positions = length - num_queries + token
    first_position = length - num_queries + first_token
    seen = tl.minimum(length, first_position + TOKENS)                 # keys that any row here may see
    last = tl.maximum((seen + TILE - 1) // TILE, 1) - 1                # the last tile with such a key
    full = tl.minimum(tl.maximum(first_position + 1, 0) // TILE, last)  # tiles that every row sees whole
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    k_base = k_ptr + kv_head * k_head + dim[None, :]
    v_base = v_ptr + kv_head * v_head + dim[None, :]
    scale *= LOG2_E
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    # The scores of the next tile are asked for before the values of this one are weighed: the tensor cores work
    # on one product while the softmax between the two is computed.
    k = load_tile(k_base, 0, length, table_ptr, k_block, k_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
    scores = tl.dot(q, k.T, input_precision="ieee")
    for tile in range(0, full):
        p, alpha, m, l = _weigh(scores, m, l, tile, positions, scale, TILE, False)
        k = load_tile(k_base, tile + 1, length, table_ptr, k_block, k_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_tile(v_base, tile, length, table_ptr, v_block, v_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    for tile in range(full, last):
        p, alpha, m, l = _weigh(scores, m, l, tile, positions, scale, TILE, True)
        k = load_tile(k_base, tile + 1, length, table_ptr, k_block, k_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_tile(v_base, tile, length, table_ptr, v_block, v_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    p, alpha, m, l = _weigh(scores, m, l, last, positions, scale, TILE, True)
    v = load_tile(v_base, last, length, table_ptr, v_block, v_row, HEAD_DIM, BLOCK_SIZE, TILE, PADDED_DIM)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]                    # an empty context gives zeros
    tl.store(out_ptr + (line * out_token + head * out_head)[:, None] + dim[None, :],
             acc.to(out_ptr.dtype.element_ty), mask=real)


def prefill(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
            seq_lens: torch.Tensor, query_start_loc: torch.Tensor, scale: float, out: torch.Tensor,
            min_queries: int = 1) -> None:
    """Write into `out` the attention of every request with at least `min_queries` queries; leave the rest alone.

    q, out: [N, num_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads, head_dim]; block_tables:
    [requests, max_blocks], seq_lens: [requests], query_start_loc: [requests + 1], all integers on the GPU.
    A context of 0 tokens gives zeros.
    """
    (num_tokens, num_heads, head_dim), num_requests = q.shape, len(seq_lens)
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    rows, tile, warps, stages = 128, 64, 8, 3
    # One program for each `rows // group` tokens of a request; the GPU knows how many, the CPU an upper bound.
    most = num_tokens // (rows // group) + min(num_requests, num_tokens)
    _prefill_kernel[most * num_kv_heads,](
        q, k_cache, v_cache, out, block_tables, seq_lens, query_start_loc, scale, num_requests,
        block_tables.stride(0), *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=rows, TILE=tile,
        MIN_QUERIES=min_queries, PADDED_DIM=triton.next_power_of_2(head_dim),
        PADDED_REQUESTS=max(64, triton.next_power_of_2(num_requests)), num_warps=warps, num_stages=stages)
