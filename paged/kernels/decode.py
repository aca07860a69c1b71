"""Decode attention: one new token a request over its paged context, in one Triton kernel.

The context of every (request, KV head) pair is cut into tiles of TILE tokens, and all tiles of the
batch are laid on one line, which is cut into equal shares, one a program:

    request 0, head 0 │ request 0, head 1 │ request 1, head 0 │ request 1, head 1
    ▢ ▢ ▢ ▢ ▢         │ ▢ ▢ ▢ ▢ ▢         │ ▢ ▢               │ ▢ ▢
    └─ program 0 ─┘└── program 1 ──┘└── program 2 ──┘└── program 3 ──┘

So every program has the same work, whether the batch is one long context, many short ones, or both
mixed. The number of programs depends on the card alone, and the cut is computed on the GPU from the
lengths: a CUDA graph captured once serves every mixture of lengths. A pair that lies whole in one
program is written to the output. A pair that is cut leaves one partial result in each of its
programs, and the program that finishes last adds them up, always in the order of the line.

Work split: "stream-K" (Osama et al., 2023) applied to Flash-Decoding (Dao et al., 2023); the query
heads of a KV head as the rows of one matrix product: FlashInfer, FlashAttention-3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.device import Card, device_properties
from paged.kernels.common import (
    LOG2_E,
    counters,
    in_float16,
    launch,
    load_numbers,
    load_scales,
    raw,
    start_early,
    tile_slots,
)


@triton.jit
def equal_shares(seq_lens_ptr, query_start_loc_ptr, num_requests, NUM_KV_HEADS: tl.constexpr,
                 TILE: tl.constexpr, PADDED_REQUESTS: tl.constexpr):
    """Tiles of one KV head of each request, where the request ends on the line of tiles, the length
    of the line, and the tiles a program takes. A request with other than one query has no tiles
    here; an empty context has one."""
    request = tl.arange(0, PADDED_REQUESTS)
    valid = request < num_requests
    length = tl.load(seq_lens_ptr + request, mask=valid, other=0)
    first = tl.load(query_start_loc_ptr + request, mask=valid, other=0)
    last = tl.load(query_start_loc_ptr + request + 1, mask=valid, other=0)
    tiles = tl.where(last - first == 1, tl.maximum((length + TILE - 1) // TILE, 1), 0)
    total = tl.sum(tiles, 0) * NUM_KV_HEADS
    return tiles, tl.cumsum(tiles, 0) * NUM_KV_HEADS, total, tl.maximum(
        tl.cdiv(total, tl.num_programs(0)), 1)


@triton.jit
def _find(position, tiles, ends, NUM_KV_HEADS: tl.constexpr):
    """Which request a tile of the line belongs to, its tiles of a KV head, which head, which tile
    of it."""
    request = tl.sum((ends <= position).to(tl.int32), 0)
    index = tl.arange(0, tiles.shape[0])
    own_tiles = tl.sum(tl.where(index == request, tiles, 0), 0)
    inside = position - tl.sum(tl.where(index < request, tiles, 0), 0) * NUM_KV_HEADS
    return request, own_tiles, inside // own_tiles, inside % own_tiles


@triton.jit
def _add_up(partial_ptr, lse_ptr, pair, first, last, share, GROUP: tl.constexpr,
            HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr,
            PIECES: tl.constexpr):
    """The attention of the pair that begins at `pair`, [HEADS, PADDED_DIM], from what programs
    first to last left."""
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_DIM)
    m = tl.full([HEADS], float("-inf"), tl.float32)
    l = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    for start in range(first, last + 1, PIECES):
        program = start + tl.arange(0, PIECES)
        place = 2 * program + ((program == first) & (pair > first * share)).to(tl.int32)
        row = place[:, None] * GROUP + head[None, :]
        inside = (program <= last)[:, None] & (head < GROUP)[None, :]
        # Not from the L1 cache, which may hold what stood there before.
        lse = tl.load(lse_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(partial_ptr + row[:, :, None] * HEAD_DIM + dim[None, None, :],
                          mask=inside[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0,
                          cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_new = tl.where(head < GROUP, m_new, 0.0)
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(lse - m_new[None, :])
        l = l * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * partial, 0)
        m = m_new
    return acc / tl.where(head < GROUP, l, 1.0)[:, None]


@triton.jit
def decode_share(q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, counter_ptr, block_tables_ptr,
                 seq_lens_ptr, query_start_loc_ptr, scale, table_stride, q_stride, tiles, ends,
                 total, share, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                 HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
                 PADDED_GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
                 PIECES: tl.constexpr, GAP: tl.constexpr, CONVERTS: tl.constexpr):
    """The attention of this program's share of the line of tiles."""
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    begin = tl.program_id(0) * share
    stop = tl.minimum(begin + share, total)
    group = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    real = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    lse_ptr = partial_ptr + 2 * tl.num_programs(0) * GROUP * HEAD_DIM

    position = begin  # on the line of tiles
    while position < stop:
        request, own_tiles, kv_head, first_tile = _find(position, tiles, ends, NUM_KV_HEADS)
        last_tile = tl.minimum(own_tiles, first_tile + stop - position)
        length = tl.load(seq_lens_ptr + request)
        row = tl.load(query_start_loc_ptr + request).to(tl.int64)
        heads = (kv_head * GROUP + group) * HEAD_DIM  # the query heads that share this KV head
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        slots = tile_slots(first_tile, length, table_ptr, BLOCK_SIZE, TILE)
        q = tl.load(q_ptr + row * q_stride + heads[:, None] + dim[None, :], mask=real, other=0.0)
        size = 1.0
        if GAP:
            q, size = in_float16(q)
            size = size[:, None]
        k_base = k_ptr + kv_head * HEAD_DIM + dim[None, :]
        v_base = v_ptr + kv_head * HEAD_DIM + dim[None, :]

        # Online softmax over the tiles: m is the running maximum, l the running sum, acc the
        # weighted values. Of an FP8 cache they are weighted by scales too, with a maximum n of
        # their own: the weights must fit float16.
        m = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        n = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        l = tl.zeros([PADDED_GROUP], tl.float32)
        acc = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        for tile in range(first_tile, last_tile):
            k = load_numbers(k_base, slots, q.dtype, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP,
                             CONVERTS)
            v = load_numbers(v_base, slots, q.dtype, ROW, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, GAP,
                             CONVERTS)
            if GAP:
                k_scale = load_scales(k_ptr, kv_head, slots, ROW, BLOCK_SIZE, GAP, CONVERTS)
                v_scale = load_scales(v_ptr, kv_head, slots, ROW, BLOCK_SIZE, GAP, CONVERTS)
            slots = tile_slots(tile + 1, length, table_ptr, BLOCK_SIZE,
                               TILE)  # asked for one tile ahead
            scores = tl.dot(q, k.T, input_precision="ieee") * (size * scale * LOG2_E)
            if GAP:
                scores *= k_scale[None, :]
            token = tile * TILE + tl.arange(0, TILE)
            scores = tl.where((token < length)[None, :], scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(scores - m_new[:, None])
            l = l * alpha + tl.sum(p, 1)
            if GAP:
                scores += tl.log2(v_scale)[None, :]
                n_new = tl.maximum(n, tl.max(scores, 1))
                alpha = tl.exp2(n - n_new)
                p = tl.exp2(scores - n_new[:, None])
                n = n_new
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m = m_new
        if GAP:
            acc *= tl.exp2(n - m)[:, None]
        acc = tl.where(length > 0, acc / l[:, None],
                       0.0)  # of an empty context the sum is not a number

        pair = position - first_tile  # where the pair begins on the line
        first, last = pair // share, (pair + own_tiles - 1) // share  # the programs that share it
        out = out_ptr + row * (NUM_KV_HEADS * GROUP * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM)
        if first == last:
            tl.store(out + group[:, None] * HEAD_DIM + dim[None, :],
                     acc.to(out_ptr.dtype.element_ty), mask=real)
        else:
            # A program cuts at most two pairs: place 0 takes what it begins with, place 1 what it
            # ends with.
            place = (2 * tl.program_id(0) + (position > begin).to(tl.int32)) * GROUP + group
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=real)
            tl.store(lse_ptr + place, m + tl.log2(l), mask=group < GROUP)
            tl.debug_barrier()  # all threads of this program have stored
            if tl.atomic_add(counter_ptr + first, 1, sem="acq_rel") == last - first:
                whole = _add_up(partial_ptr, lse_ptr, pair, first, last, share, GROUP, HEAD_DIM,
                                PADDED_DIM, HEADS, PIECES)
                head = tl.arange(0, HEADS)
                tl.store(out + head[:, None] * HEAD_DIM + dim[None, :],
                         whole.to(out_ptr.dtype.element_ty),
                         mask=(head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :])
                tl.store(counter_ptr + first, 0)  # for the next call
        position += last_tile - first_tile


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _decode_kernel(q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, counter_ptr, block_tables_ptr,
                   seq_lens_ptr, query_start_loc_ptr, scale, num_requests, table_stride, q_stride,
                   NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                   PADDED_DIM: tl.constexpr, PADDED_REQUESTS: tl.constexpr, TILE: tl.constexpr,
                   PADDED_GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
                   PIECES: tl.constexpr, EARLY: tl.constexpr, GAP: tl.constexpr,
                   CONVERTS: tl.constexpr):
    tiles, ends, total, share = equal_shares(seq_lens_ptr, query_start_loc_ptr, num_requests,
                                             NUM_KV_HEADS, TILE, PADDED_REQUESTS)
    start_early(EARLY)  # behind it: q, and the newest token's K and V
    decode_share(q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, counter_ptr, block_tables_ptr,
                 seq_lens_ptr, query_start_loc_ptr, scale, table_stride, q_stride, tiles, ends,
                 total, share, NUM_KV_HEADS, GROUP, HEAD_DIM, PADDED_DIM, TILE, PADDED_GROUP,
                 BLOCK_SIZE, HEADS, PIECES, GAP, CONVERTS)


def launch_shape(card: Card, dtype: torch.dtype, head_dim: int, num_requests: int,
                 group: int) -> tuple[int, int, int, int]:
    """Tokens a tile, warps a program, loads in flight, programs a multiprocessor; measured on an
    H200, elsewhere what fits.

    A program stands still between two pairs: many small programs cover for each other.
    """
    if card.capability < 8:  # what is on its way takes registers
        return 16, 4, 2, 3
    if dtype == torch.float32:
        return 32, 4, 3, 2
    many = group > (8 if head_dim > 128 else
                    16) or num_requests > 512  # more than the registers of one warp hold
    if head_dim > 128:
        return (32, 4, 3, 2) if num_requests < 8 or many else (16, 1, 3, 4)
    if many:
        return 64, 4, 3, 2
    return (64, 1, 3, 4) if head_dim <= 64 else (32, 1, 2, 8)


def decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
           scale: float, out: torch.Tensor, early: bool = False) -> None:
    """Write into `out` the attention of every request that has exactly one query; leave the other
    rows alone.

    q, out: [N, num_heads, head_dim], the heads of a token side by side; caches: a layer of a
    PagedKVCache, [num_blocks, block_size, num_kv_heads, head_dim]; block_tables: [requests,
    max_blocks], seq_lens: [requests], query_start_loc: [requests + 1], int32 on the GPU. A context
    of 0 tokens gives zeros. The launch depends on shapes alone: safe to capture in a CUDA graph.

    early: start while the kernel before is still at work, and wait for what it writes; seq_lens and
    query_start_loc, which are read at once, must be older.
    """
    num_requests, num_heads, head_dim = len(seq_lens), q.shape[1], q.shape[2]
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    (k_cache, gap), (v_cache, _) = raw(k_cache), raw(v_cache)
    card = device_properties(q.device)
    tile, warps, stages, programs = launch_shape(card, q.dtype, head_dim, num_requests, group)
    if gap and card.capability < 8:  # numbers made of bytes fill the registers of four warps
        warps, programs = 8, 1
    # Early programs are dealt out evenly where they fill a multiprocessor exactly: one warp and 32
    # tokens do.
    early = early and card.starts_early and (tile, warps) == (32, 1)
    heads, padded_dim = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    # Equal shares end together only where all programs run at once: no more than the shared memory
    # holds.
    one_stage = 2 * tile * padded_dim * q.element_size(
    )  # K and V on their way; the rest is Triton's own
    while stages > 1 and one_stage * (stages - 1) + 9 * 1024 > card.shared_memory:
        stages -= 1
    needed = one_stage * (stages - 1) + 9 * 1024
    programs = card.processors * max(1, min(programs, card.shared_memory // needed))
    # Added up at once: a pair of few requests has many pieces; and the registers must hold them.
    pieces = max(1, min(16 if num_requests < 64 else 2, 4096 * warps // (heads * padded_dim)))
    # One float32 result and one log-sum-exp for each of two cut pairs a program.
    partial = torch.empty(2 * programs * group * (head_dim + 1), dtype=torch.float32,
                          device=q.device)
    launch(
        _decode_kernel, (programs, 1, 1), (q, k_cache, v_cache, out, partial, counters(
            q.device), block_tables, seq_lens, query_start_loc),
        (scale, num_requests, block_tables.stride(0)), (q.stride(0),),
        (num_kv_heads, group, head_dim, padded_dim, max(
            64, triton.next_power_of_2(num_requests)), tile, max(16, triton.next_power_of_2(group)),
         block_size, heads, pieces, early, gap, card.converts_fp8), num_warps=warps,
        num_stages=stages, **({"launch_pdl": True} if early else {}))
