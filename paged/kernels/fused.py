"""The decoder's small operations as Triton kernels: one pass over memory each, where PyTorch takes
several.

    rotate_and_store   the norm's scale, per-head RMSNorm, rotary embedding, and K and V straight into their slots
    silu_mul           the norm's scale, silu(gate) × up
    sample             softmax and draw over the vocabulary: one pass, one random number a row, no sort
    prepare            what the layers start from, out of what stays on the GPU: embeddings, slots, block tables

Each is held to the plain decoder and sampler by tests; the decoder that uses them is in
`models/fused_decoder.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import early_launch, start_early


@triton.jit
def _norm_scale(x_ptr, row, eps, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """1 / root mean square of a row of x: all of an RMSNorm whose weight is in the matrix that
    follows."""
    column = tl.arange(0, PADDED_WIDTH)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_store_kernel(
        qkv_ptr, x_ptr, bias_ptr, positions_ptr, slots_ptr, rotation_ptr, q_norm_ptr, k_norm_ptr,
        q_ptr, k_cache_ptr, v_cache_ptr, eps, num_tokens, k_block, k_row, NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
        NORM: tl.constexpr, HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, SCALE: tl.constexpr,
        BIAS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, EARLY: tl.constexpr):
    # The heads of a token lie in a row, | q 0 … | k 0 … | v 0 …; a program takes HEADS of them, and
    # of each the first and the second half, which rotary turns together.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, PADDED_HALF)
    real = dim < half
    inside = (head < all_heads)[:, None] & real[None, :]
    is_q = (head < NUM_HEADS)[:, None]
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if NORM:
        first_weight = tl.where(is_q,
                                tl.load(q_norm_ptr + dim, mask=real, other=0.0)[None, :],
                                tl.load(k_norm_ptr + dim, mask=real,
                                        other=0.0)[None, :]).to(tl.float32)
        second_weight = tl.where(is_q,
                                 tl.load(q_norm_ptr + half + dim, mask=real, other=0.0)[None, :],
                                 tl.load(k_norm_ptr + half + dim, mask=real,
                                         other=0.0)[None, :]).to(tl.float32)
    # Before the wait: positions are older than the kernel before.
    position = tl.load(positions_ptr + token)
    angle = rotation_ptr + tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(angle, mask=real, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=real, other=0.0)[None, :]
    start_early(EARLY)
    if position < 0:  # padding
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row = qkv_ptr + (token * all_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    first = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + half, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        factor = _norm_scale(x_ptr, token, eps, WIDTH, PADDED_WIDTH)
        first *= factor
        second *= factor
    if BIAS:
        bias = bias_ptr + head[:, None] * HEAD_DIM + dim[None, :]
        first += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + half, mask=inside, other=0.0).to(tl.float32)
    x, y = first, second
    if NORM:
        dtype = qkv_ptr.dtype.element_ty
        length = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
        x = (x * length * first_weight).to(dtype).to(tl.float32)
        y = (y * length * second_weight).to(dtype).to(tl.float32)
    first = tl.where(is_v, first, x * cos - y * sin).to(qkv_ptr.dtype.element_ty)
    second = tl.where(is_v, second, y * cos + x * sin).to(qkv_ptr.dtype.element_ty)

    at = q_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(at, first, mask=inside & is_q)
    tl.store(at + half, second, mask=inside & is_q)
    if slot < 0:
        return
    kv_head = tl.where(is_v, head[:, None] - NUM_HEADS - NUM_KV_HEADS, head[:, None] - NUM_HEADS)
    place = (slot // BLOCK_SIZE) * k_block + (slot % BLOCK_SIZE) * k_row + kv_head * HEAD_DIM + dim[
        None, :]
    is_k = (is_q == 0) & (is_v == 0)
    tl.store(k_cache_ptr + place, first, mask=inside & is_k)
    tl.store(k_cache_ptr + place + half, second, mask=inside & is_k)
    tl.store(v_cache_ptr + place, first, mask=inside & is_v)
    tl.store(v_cache_ptr + place + half, second, mask=inside & is_v)


def rotate_and_store(qkv: torch.Tensor, x: torch.Tensor | None, bias: torch.Tensor | None,
                     positions: torch.Tensor, slots: torch.Tensor, rotation: torch.Tensor,
                     q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
                     k_cache: torch.Tensor, v_cache: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Finish Q, K and V of the product `qkv`, turn Q and K, and write K and V to their slots;
    returns Q.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads) × head_dim], contiguous.
        x: [tokens, hidden], contiguous; where given, qkv is multiplied by the scale of its RMSNorm.
        bias: that of the product, or None.
        positions, slots: [tokens]; −1 for padding, which writes nothing.
        rotation: [max positions, head_dim] in float32, cosines then sines (`rotation_table`).
        q_norm, k_norm: weights of a norm of each head, or None.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of this layer, strides
            alike.

    Returns [tokens, num_heads, head_dim]; rows of padding are left as they are.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, all_heads = len(qkv), num_heads + 2 * num_kv_heads
    heads, warps = (16, 2) if num_tokens < 1024 else (32, 4)  # measured on an H200
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rotate_and_store_kernel[num_tokens, triton.cdiv(all_heads, heads)](
        qkv, qkv if x is None else x, qkv if bias is None else bias, positions, slots, rotation,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, q, k_cache, v_cache,
        eps, num_tokens, *k_cache.stride()[:2], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NORM=q_norm is not None, HEADS=heads,
        PADDED_HALF=triton.next_power_of_2(
            head_dim // 2), BIAS=bias is not None, num_warps=warps, **_scaled_by(x), **early_launch(
                qkv.device))
    return q


def rotation_table(frequencies: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Cosines and sines of every position, float32 [max_positions, head_dim]."""
    angles = torch.arange(max_positions, device=frequencies.device,
                          dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, x_ptr, out_ptr, eps, NUM_OUTPUTS: tl.constexpr,
                     COLUMNS: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr,
                     PADDED_WIDTH: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < NUM_OUTPUTS
    at = gate_up_ptr + row * 2 * NUM_OUTPUTS + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + NUM_OUTPUTS, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        factor = _norm_scale(x_ptr, row, eps, WIDTH, PADDED_WIDTH)
        gate *= factor
        up *= factor
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * NUM_OUTPUTS + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, x: torch.Tensor | None, eps: float) -> torch.Tensor:
    """silu(gate) × up of [tokens, 2 × outputs], gate in the first half; returns [tokens, outputs].

    x: [tokens, hidden], contiguous; where given, gate and up are first multiplied by the scale of
        its RMSNorm.
    """
    num_tokens, outputs = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_tokens, outputs, dtype=gate_up.dtype, device=gate_up.device)
    columns = min(4096, triton.next_power_of_2(outputs))
    _silu_mul_kernel[num_tokens, triton.cdiv(outputs, columns)](
        gate_up, gate_up if x is None else x, out, eps, NUM_OUTPUTS=outputs, COLUMNS=columns,
        num_warps=8, **_scaled_by(x), **early_launch(out.device))
    return out


def _scaled_by(x: torch.Tensor | None) -> dict:
    """Constants of a kernel that multiplies by the scale of x's RMSNorm, or does not."""
    width = 1 if x is None else x.shape[1]
    return {"SCALE": x is not None, "WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}


@triton.jit
def _weigh_slices_kernel(logits_ptr, seats_ptr, temperatures_ptr, top_ptr, index_ptr, weight_ptr,
                         vocab_size, SLICE: tl.constexpr, EARLY: tl.constexpr):
    # Of one slice of one row: the largest logit, where it stands, and the sum of exp((logit −
    # largest) / T).
    start_early(EARLY)
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + tl.load(seats_ptr + row))
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size,
                     other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    broken = tl.max((logits != logits).to(tl.int32), 0) > 0
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(index_ptr + at, tl.min(tl.where(logits == top, token, 2147483647),
                                    0))  # the first of equals
    tl.store(top_ptr + at, tl.where(broken, float("nan"), top))
    if temperature > 0:
        sharpness = 1.4426950408889634 / tl.maximum(temperature, 1e-10)
        weight = tl.exp2((logits - tl.maximum(top, -3e38)) * sharpness)
        tl.store(weight_ptr + at, tl.sum(weight, 0))


@triton.jit
def _first_above(weight, threshold, place):
    """The first place where the running sum of the weights passes the threshold, never one of
    weight 0."""
    running = tl.cumsum(weight, 0)
    passed = (running > threshold) & (weight > 0)
    first = tl.min(tl.where(passed, place, 2147483647), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, place, 0), 0))  # rounding: the last one


@triton.jit
def _draw_kernel(logits_ptr, seats_ptr, seq_lens_ptr, temperatures_ptr, seeds_ptr, top_ptr,
                 index_ptr, weight_ptr, tokens_ptr, out_ptr, turn_ptr, vocab_size, out_width,
                 SLICES: tl.constexpr, PADDED: tl.constexpr, SLICE: tl.constexpr,
                 EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    temperature = tl.load(temperatures_ptr + seat)
    part = tl.arange(0, PADDED)
    at = row * SLICES + part
    inside = part < SLICES
    tops = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    best = tl.max(tops, 0)
    broken = (tl.max((tops != tops).to(tl.int32), 0) > 0) | (tl.abs(best) == float("inf"))
    chosen = tl.min(
        tl.where(tops == best, tl.load(index_ptr + at, mask=inside, other=2147483647), 2147483647),
        0)
    if (temperature > 0) & (broken == 0):
        sharpness = 1.4426950408889634 / tl.maximum(temperature, 1e-10)
        weights = tl.load(weight_ptr + at, mask=inside, other=0.0)
        weights = tl.where(inside & (tops > float("-inf")),
                           weights * tl.exp2((tops - best) * sharpness), 0.0)
        # A counter-based generator: the draw depends on the request's seed and the token's place in
        # its text alone.
        threshold = tl.rand(tl.load(seeds_ptr + seat), tl.load(seq_lens_ptr + row)) * tl.sum(
            weights, 0)
        slice = _first_above(weights, threshold, part)
        threshold -= tl.sum(tl.where(part < slice, weights, 0.0), 0)
        token = slice * SLICE + tl.arange(0, SLICE)
        logits = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + token, mask=token
                         < vocab_size, other=float("-inf")).to(tl.float32)
        chosen = _first_above(tl.exp2((logits - best) * sharpness), threshold, token)
    tl.store(out_ptr + tl.load(turn_ptr) * out_width + row, tl.where(broken, -1, chosen))
    tl.store(tokens_ptr + seat, tl.where(broken, 0, chosen))


def sample(logits: torch.Tensor, seats: torch.Tensor, seq_lens: torch.Tensor,
           temperatures: torch.Tensor, seeds: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor,
           turn: torch.Tensor) -> None:
    """Draw each row's next token from softmax(logits / temperature); the largest logit's at
    temperature 0.

    One pass reads the logits and leaves of every slice of the vocabulary its share of the
    probability; the draw then picks a slice, and reads that slice again to pick the token. One
    random number a row, no sort.

    Args:
        logits: [rows, vocab_size], contiguous. A row with NaN or infinity, or with nothing above
            −infinity, gives −1.
        seats, seq_lens: [rows]; the seat of each row, and the length of its context.
        temperatures, seeds, tokens: one a seat; the token drawn is written to tokens[seat] and to
            out[turn, row].
        out: [turns, at least rows]; turn: [1], on the GPU.
    """
    num_rows, vocab_size = logits.shape
    slice_size = min(4096, max(16, triton.next_power_of_2(vocab_size)))
    slices = triton.cdiv(vocab_size, slice_size)
    top, weight = torch.empty(2, num_rows, slices, dtype=torch.float32, device=logits.device)
    index = torch.empty(num_rows, slices, dtype=torch.int32, device=logits.device)
    early = early_launch(logits.device)
    _weigh_slices_kernel[num_rows, slices](logits, seats, temperatures, top, index, weight,
                                           vocab_size, SLICE=slice_size, **early)
    _draw_kernel[
        num_rows,
    ](logits, seats, seq_lens, temperatures, seeds, top, index, weight, tokens, out, turn,
      vocab_size, out.shape[1], SLICES=slices, PADDED=triton.next_power_of_2(slices),
      SLICE=slice_size, **early)


@triton.jit(do_not_specialize=["num_tokens", "table_width"])
def _prepare_kernel(ids_ptr, positions_ptr, rows_ptr, seats_ptr, new_blocks_ptr, seq_lens_ptr,
                    tables_ptr, tokens_ptr, embedding_ptr, x_ptr, squares_ptr, slots_ptr,
                    out_tables_ptr, num_tokens, table_width, BLOCK_SIZE: tl.constexpr,
                    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    # Of two kinds of programs, the first take one token each: its slot, and its embedding.
    token = tl.program_id(0)
    if token < num_tokens:
        position = tl.load(positions_ptr + token)
        row = tl.load(rows_ptr + token)
        seat = tl.load(seats_ptr + row).to(tl.int64)
        id = tl.load(ids_ptr + token)
        if id < 0:
            id = tl.load(tokens_ptr + seat)
        slot = tl.full([], -1, tl.int64)
        if position >= 0:
            block = tl.load(new_blocks_ptr + row)  # a decode's new block comes with its row
            if block < 0:
                block = tl.load(tables_ptr + seat * table_width + position // BLOCK_SIZE)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + token, slot)
        column = tl.arange(0, PADDED_WIDTH)
        x = tl.load(embedding_ptr + id.to(tl.int64) * WIDTH + column, mask=column < WIDTH,
                    other=0.0)
        tl.store(x_ptr + token.to(tl.int64) * WIDTH + column, x, mask=column < WIDTH)
        tl.store(squares_ptr + token, tl.sum(x.to(tl.float32) * x.to(tl.float32), 0))
        return
    # The others copy the block table of one request each, and enter its new block.
    row = token - num_tokens
    table = tables_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_width
    new_block = tl.load(new_blocks_ptr + row)
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + row), BLOCK_SIZE)
    for start in range(0, num_blocks, BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        block = tl.load(table + index, mask=index < num_blocks, other=0)
        is_new = (index == num_blocks - 1) & (new_block >= 0)
        block = tl.where(is_new, new_block, block)
        tl.store(table + index, block, mask=is_new)
        tl.store(out_tables_ptr + row.to(tl.int64) * table_width + index, block, mask=index
                 < num_blocks)


def prepare(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, seats: torch.Tensor,
            new_blocks: torch.Tensor, seq_lens: torch.Tensor, tables: torch.Tensor,
            tokens: torch.Tensor, embedding: torch.Tensor,
            block_size: int) -> tuple[torch.Tensor, ...]:
    """What the layers of a step start from, in one launch.

    Args:
        ids, positions, rows: [tokens]; an id of −1 is the token last drawn for its seat, a position
            of −1 is padding, and rows says which request of the batch a token belongs to.
        seats, new_blocks, seq_lens: [requests]; a new block (else −1) is entered into the seat's
            table as the last of the context. Only rows with one token may have one.
        tables: [seats, width] block tables; tokens: [seats]; embedding: [vocab, hidden],
            contiguous.

    Returns the tokens' embeddings [tokens, hidden] and the sums of their squares [tokens, 1], their
    slots [tokens], and the requests' tables [requests, width], of which what lies behind a context
    is left as it is.
    """
    num_tokens, num_rows, (_, hidden) = len(ids), len(seats), embedding.shape
    x = torch.empty(num_tokens, hidden, dtype=embedding.dtype, device=ids.device)
    squares = torch.empty(num_tokens, 1, dtype=torch.float32, device=ids.device)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=ids.device)
    out_tables = torch.empty(num_rows, tables.shape[1], dtype=torch.int32, device=ids.device)
    _prepare_kernel[
        num_tokens + num_rows,
    ](ids, positions, rows, seats, new_blocks, seq_lens, tables, tokens, embedding, x, squares,
      slots, out_tables, num_tokens, tables.shape[1], BLOCK_SIZE=block_size, WIDTH=hidden,
      PADDED_WIDTH=triton.next_power_of_2(hidden), BLOCKS=256)
    return x, squares, slots, out_tables
