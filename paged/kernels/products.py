"""Products of few tokens with the weights, and all that lies between them, in two Triton kernels.

For a handful of tokens a layer's products cost what reading the weights costs, and each small
kernel between them (norm, activation, residual, rotary embedding, storing K and V) costs as much
again in starting and waiting. Here they ride along with the products:

    qkv_product    [scale] ► product ► per-head RMSNorm ► rotary embedding ► q; K, V to their slots
    product        [scale] ► product ► silu(gate) × up
    product                  product ► + residual ► x and its sums of squares

The weight of an RMSNorm is in the matrix that follows it (`models/fused.py`); what is left of the
norm is one factor a token, and a factor may as well be applied behind the product:

    norm(x) @ W.T = (x @ W.T) × scale

The scale needs all of x: every program that writes a part of x leaves the sum of its squares.

A program owns a tile [OUTPUTS, TOKENS] of outputs: rows of the weight times tokens, so that a few
tokens are the narrow side of the matrix instruction; the programs of a weight tile follow each
other, so that the tile comes from memory once. Where that makes too few programs to fill the card,
SPLIT of them share a tile, each a part of the width; the last to finish adds up, always in the same
order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.device import device_properties
from paged.kernels.common import (
    counters,
    early_launch,
    fp8_scale,
    largest,
    raw,
    scale_pointers,
    start_early,
    to_fp8,
)


@triton.jit
def _accumulate(x_ptr, weight_ptr, row, second_row, real, token, valid, partial_ptr, counter_ptr,
                tile, part, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
                PAIR: tl.constexpr, EVEN: tl.constexpr):
    """Rows of the weight times tokens, [OUTPUTS, TOKENS]; with PAIR a second set of rows too;
    whether it is whole.

              width ─►                   A split tile is whole for the program that finishes last.
        row  ▒▒▒▒▒▒▒▒▒▒▒▒  ×  ▒ ▒ ▒      COLUMNS of the width a time, loads a few times ahead.
        row  ▒▒▒▒▒▒▒▒▒▒▒▒     ▒ ▒ ▒
             part 0│part 1    tokens
    """
    own: tl.constexpr = (WIDTH + SPLIT * COLUMNS - 1) // (SPLIT * COLUMNS) * COLUMNS
    OUTPUTS: tl.constexpr = row.shape[0]
    TOKENS: tl.constexpr = token.shape[0]
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    second = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    weights = weight_ptr + row.to(tl.int64)[:, None] * WIDTH
    second_weights = weight_ptr + second_row.to(tl.int64)[:, None] * WIDTH
    for start in range(0, own, COLUMNS):
        column = part * own + start + tl.arange(0, COLUMNS)
        inside = (column < WIDTH)[None, :]
        x_mask = valid[:, None] if EVEN else valid[:, None] & inside
        x = tl.load(x_ptr + token[:, None] * WIDTH + column[None, :], mask=x_mask, other=0.0)
        if EVEN:
            acc = tl.dot(tl.load(weights + column[None, :]), x.T, acc, input_precision="ieee")
            if PAIR:
                second = tl.dot(tl.load(second_weights + column[None, :]), x.T, second,
                                input_precision="ieee")
        else:
            mask = real[:, None] & inside
            acc = tl.dot(tl.load(weights + column[None, :], mask=mask, other=0.0), x.T, acc,
                         input_precision="ieee")
            if PAIR:
                second = tl.dot(tl.load(second_weights + column[None, :], mask=mask, other=0.0),
                                x.T, second, input_precision="ieee")
    whole = True
    if SPLIT > 1:
        at = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        SIZE: tl.constexpr = OUTPUTS * TOKENS
        parts = partial_ptr + tile * (SPLIT * (1 + PAIR) * SIZE) + at
        tl.store(parts + part * ((1 + PAIR) * SIZE), acc)
        if PAIR:
            tl.store(parts + part * (2 * SIZE) + SIZE, second)
        tl.debug_barrier()  # all threads of this program have stored
        whole = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if whole:
            acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            second = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            for each in tl.static_range(SPLIT):
                acc += tl.load(parts + each * (1 + PAIR) * SIZE, cache_modifier=".cg")
                if PAIR:
                    second += tl.load(parts + each * 2 * SIZE + SIZE, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)  # for the next product
    return acc, second, whole


@triton.jit
def norm_scale(squares_ptr, token, valid, eps, parts, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """1 / root mean square of each token, [1, TOKENS], from the parts of its sum of squares."""
    part = tl.arange(0, PADDED)
    squares = tl.load(squares_ptr + token[:, None] * parts + part[None, :],
                      mask=valid[:, None] & (part < parts)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[None, :]


@triton.jit
def _begin(squares_ptr, eps, num_tokens, SCALE: tl.constexpr, PARTS: tl.constexpr,
           PADDED_PARTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
           EARLY: tl.constexpr):
    """The tokens of a program of its own launch, which of them are real, their scale, and its
    tile."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = token < num_tokens
    start_early(EARLY)
    scale = 1.0
    if SCALE:
        scale = norm_scale(squares_ptr, token, valid, eps, PARTS, WIDTH, PADDED_PARTS)
    return token, valid, scale, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def product_tile(x_ptr, weight_ptr, scale, residual_ptr, out_ptr, out_squares_ptr, partial_ptr,
                 counter_ptr, token, valid, output_tile, tile, part, NUM_OUTPUTS: tl.constexpr,
                 SCALE: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
                 OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                 SPLIT: tl.constexpr):
    """One tile of a product, or one part of it, and what rides along.

    scale: [1, TOKENS]; out_squares_ptr: [tokens, output tiles]; residual and out may be the same.
    """
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < NUM_OUTPUTS
    at = token[None, :] * NUM_OUTPUTS + output[:, None]
    inside = valid[None, :] & real[:, None]
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    EVEN: tl.constexpr = NUM_OUTPUTS % OUTPUTS == 0 and WIDTH % (SPLIT * COLUMNS) == 0
    acc, up, whole = _accumulate(x_ptr, weight_ptr, output, output + NUM_OUTPUTS, real, token,
                                 valid, partial_ptr, counter_ptr, tile, part, WIDTH, COLUMNS, SPLIT,
                                 SILU, EVEN)
    if whole:
        if SCALE:
            acc *= scale
        if SILU:
            if SCALE:
                up *= scale
            acc = acc / (1 + tl.exp(-acc)) * up
        if RESIDUAL:
            acc = (acc + residual).to(out_ptr.dtype.element_ty).to(tl.float32)
            squares = tl.sum(tl.where(inside, acc * acc, 0.0), 0)
            TILES: tl.constexpr = (NUM_OUTPUTS + OUTPUTS - 1) // OUTPUTS
            tl.store(out_squares_ptr + token * TILES + output_tile, squares, mask=valid)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(x_ptr, weight_ptr, squares_ptr, residual_ptr, out_ptr, out_squares_ptr,
                    partial_ptr, counter_ptr, eps, num_tokens, NUM_OUTPUTS: tl.constexpr,
                    SCALE: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
                    SILU: tl.constexpr, RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr,
                    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                    SPLIT: tl.constexpr, EARLY: tl.constexpr):
    token, valid, scale, tile = _begin(squares_ptr, eps, num_tokens, SCALE, PARTS, PADDED_PARTS,
                                       TOKENS, WIDTH, EARLY)
    product_tile(x_ptr, weight_ptr, scale, residual_ptr, out_ptr,
                 out_squares_ptr, partial_ptr, counter_ptr, token, valid, tl.program_id(1), tile,
                 tl.program_id(2), NUM_OUTPUTS, SCALE, SILU, RESIDUAL, OUTPUTS, COLUMNS, WIDTH,
                 SPLIT)


@triton.jit
def qkv_head(x_ptr, weight_ptr, scale, bias_ptr, positions_ptr, slots_ptr, rotation_ptr, q_norm_ptr,
             k_norm_ptr, q_ptr, k_cache_ptr, v_cache_ptr, partial_ptr, counter_ptr, eps, token,
             valid, k_block, k_row, head, tile, part, NUM_HEADS: tl.constexpr,
             NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
             NORM: tl.constexpr, BIAS: tl.constexpr, GAP: tl.constexpr, SCALE: tl.constexpr,
             HALF: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """One head of the QKV product, or one part of it, q 0 … | k 0 … | v 0 …: its first and second
    half, which rotary embedding turns together."""
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF)
    real = dim < half
    position = tl.maximum(tl.load(positions_ptr + token, mask=valid, other=0), 0)  # of padding: any
    slot = tl.load(slots_ptr + token, mask=valid, other=-1).to(tl.int64)
    EVEN: tl.constexpr = HALF == half and WIDTH % (SPLIT * COLUMNS) == 0
    first, second, whole = _accumulate(
        x_ptr, weight_ptr, head * HEAD_DIM + dim, head * HEAD_DIM + half + dim, real, token, valid,
        partial_ptr, counter_ptr, tile, part, WIDTH, COLUMNS, SPLIT, True, EVEN)
    if whole:
        inside = valid[None, :] & real[:, None]
        if SCALE:
            first *= scale
            second *= scale
        if BIAS:
            bias = bias_ptr + head * HEAD_DIM + dim
            first += tl.load(bias, mask=real, other=0.0).to(tl.float32)[:, None]
            second += tl.load(bias + half, mask=real, other=0.0).to(tl.float32)[:, None]
        if head < NUM_HEADS + NUM_KV_HEADS:
            if NORM:
                norm_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
                length = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / HEAD_DIM
                                  + eps)[None, :]
                first *= length * tl.load(norm_ptr + dim, mask=real, other=0.0).to(tl.float32)[:,
                                                                                               None]
                second *= length * tl.load(norm_ptr + half + dim, mask=real, other=0.0).to(
                    tl.float32)[:, None]
            angle = rotation_ptr + position.to(tl.int64)[None, :] * HEAD_DIM + dim[:, None]
            cos = tl.load(angle, mask=inside, other=0.0)
            sin = tl.load(angle + half, mask=inside, other=0.0)
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        if head < NUM_HEADS:
            own = q_ptr + (token[None, :] * NUM_HEADS + head) * HEAD_DIM + dim[:, None]
            tl.store(own, first.to(q_ptr.dtype.element_ty), mask=inside)
            tl.store(own + half, second.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            base = k_cache_ptr if head < NUM_HEADS + NUM_KV_HEADS else v_cache_ptr
            row = (slot // BLOCK_SIZE) * k_block + (slot % BLOCK_SIZE) * k_row + kv_head * HEAD_DIM
            at = base + row[None, :] + dim[:, None]
            stored = inside & (slot >= 0)[None, :]
            if GAP:
                row_scale, inverse = fp8_scale(tl.maximum(largest(first, 0), largest(second, 0)))
                scales = scale_pointers(base, kv_head, slot, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE,
                                        GAP)
                tl.store(scales, row_scale, mask=valid & (slot >= 0))
                tl.store(at, to_fp8(first * inverse[None, :]), mask=stored)
                tl.store(at + half, to_fp8(second * inverse[None, :]), mask=stored)
            else:
                tl.store(at, first.to(base.dtype.element_ty), mask=stored)
                tl.store(at + half, second.to(base.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tokens"])
def _qkv_kernel(x_ptr, weight_ptr, squares_ptr, bias_ptr, positions_ptr, slots_ptr, rotation_ptr,
                q_norm_ptr, k_norm_ptr, q_ptr, k_cache_ptr, v_cache_ptr, partial_ptr, counter_ptr,
                eps, num_tokens, k_block, k_row, NUM_HEADS: tl.constexpr,
                NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                NORM: tl.constexpr, BIAS: tl.constexpr, GAP: tl.constexpr, SCALE: tl.constexpr,
                PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, HALF: tl.constexpr,
                TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
                SPLIT: tl.constexpr, EARLY: tl.constexpr):
    token, valid, scale, tile = _begin(squares_ptr, eps, num_tokens, SCALE, PARTS, PADDED_PARTS,
                                       TOKENS, WIDTH, EARLY)
    qkv_head(x_ptr, weight_ptr, scale, bias_ptr, positions_ptr, slots_ptr, rotation_ptr, q_norm_ptr,
             k_norm_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
             partial_ptr, counter_ptr, eps, token, valid, k_block, k_row, tl.program_id(1), tile,
             tl.program_id(2), NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NORM, BIAS, GAP,
             SCALE, HALF, COLUMNS, WIDTH, SPLIT)


def tile_shape(kind: str, num_tokens: int) -> tuple[int, int, int, int, int]:
    """Tokens and columns a tile, programs that share one, loads in flight, warps; measured on an
    H200."""
    if kind == "residual":
        return (32, 128, 4, 6, 4) if num_tokens <= 64 else (64, 128, 4, 4, 4)
    if kind == "qkv":
        return (16, 128, 1, 4, 4) if num_tokens <= 64 else (32, 64, 1, 6, 4)
    return (32, 128, 1, 4, 4) if num_tokens <= 64 else (64, 64, 1, 5, 4)


MOST_SPLIT = 512
"""Programs up to which a product is split: enough to fill a card."""


def _shared(kind: str, x: torch.Tensor, outputs: int, squares: torch.Tensor | None, tiles: int,
            pair: bool):
    """What both kernels need: grid, workspace for split tiles, and the constants of the tile."""
    num_tokens, width = x.shape
    card = device_properties(x.device)
    tokens, columns, split, stages, warps = tile_shape(kind, num_tokens)
    if card.capability < 8:  # what is on its way takes registers
        tokens, columns = min(tokens, 32), min(columns, 32)
    token_tiles = triton.cdiv(num_tokens, tokens)
    if tiles * token_tiles * split > MOST_SPLIT:
        split = 1
    columns = min(columns * 2 // x.element_size(),
                  max(16, triton.next_power_of_2(triton.cdiv(width, split))))
    one_stage = (outputs * (1 + pair) + tokens) * columns * x.element_size()
    stages = max(1, min(stages, card.shared_memory // one_stage))
    size = tiles * token_tiles * split * outputs * tokens * (1 + pair) if split > 1 else 1
    parts = 1 if squares is None else squares.shape[1]
    constants = {
        "SCALE": squares is not None, "PARTS": parts, "PADDED_PARTS": triton.next_power_of_2(parts),
        "TOKENS": tokens, "COLUMNS": columns, "WIDTH": width, "SPLIT": split, "num_warps": warps,
        "num_stages": stages, **early_launch(x.device)
    }
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    return (token_tiles, tiles, split), partial, counters(x.device), constants


def product(x: torch.Tensor, weight: torch.Tensor, eps: float = 0.0,
            squares: torch.Tensor | None = None, residual: torch.Tensor | None = None,
            silu: bool = False):
    """x @ weight.T, scaled by the RMSNorm that `squares` belong to; then silu-and-mul, or the
    residual added.

    Args:
        x: [tokens, width], contiguous.
        weight: [outputs, width], or with silu [2 × outputs, width], gate rows first.
        squares: [tokens, parts], float32; the parts of the sum of squares of each token of x.
        residual: [tokens, outputs], contiguous.

    Returns [tokens, outputs]; with a residual also the squares of that, [tokens, parts].
    """
    num_tokens, outputs = len(x), len(weight) // 2 if silu else len(weight)
    tiles = triton.cdiv(outputs, 64)
    kind = "silu" if silu else "plain" if residual is None else "residual"
    grid, partial, counts, constants = _shared(kind, x, 64, squares, tiles, silu)
    out = torch.empty(num_tokens, outputs, dtype=x.dtype, device=x.device)
    out_squares = partial if residual is None else torch.empty(num_tokens, tiles,
                                                               dtype=torch.float32, device=x.device)
    _product_kernel[grid](x, weight, x if squares is None else squares,
                          x if residual is None else residual, out, out_squares, partial, counts,
                          eps, num_tokens, NUM_OUTPUTS=outputs, SILU=silu, RESIDUAL=residual
                          is not None, OUTPUTS=64, **constants)
    return out if residual is None else (out, out_squares)


def qkv_product(x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor,
                bias: torch.Tensor | None, positions: torch.Tensor, slots: torch.Tensor,
                rotation: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
                eps: float, k_cache: torch.Tensor, v_cache: torch.Tensor,
                num_heads: int) -> torch.Tensor:
    """Q of the tokens, [tokens, num_heads, head_dim], normed and turned; their K and V go to their
    slots.

    x, weight, squares: as for `product`; the rest as for `fused.rotate_and_store`.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    half = max(16, triton.next_power_of_2(head_dim // 2))
    heads = num_heads + 2 * num_kv_heads
    (k_cache, gap), (v_cache, _) = raw(k_cache), raw(v_cache)
    grid, partial, counts, constants = _shared("qkv", x, half, squares, heads, True)
    q = torch.empty(len(x), num_heads, head_dim, dtype=x.dtype, device=x.device)
    _qkv_kernel[grid](x, weight, squares, x if bias is None else bias, positions, slots, rotation,
                      x if q_norm is None else q_norm,
                      x if k_norm is None else k_norm, q, k_cache, v_cache, partial, counts, eps,
                      len(x), *k_cache.stride()[:2], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
                      HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NORM=q_norm is not None, BIAS=bias
                      is not None, GAP=gap, HALF=half, **constants)
    return q
