"""What lies between the library's products, a pass over memory each, where PyTorch takes several.

    rotate_and_store   the norm's scale, per-head RMSNorm, rotary embedding, K and V to their slots
    silu_mul           the norm's scale, silu(gate) × up
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import (
    early_launch,
    fp8_scale,
    largest,
    raw,
    scale_pointers,
    start_early,
    to_fp8,
)


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
        BIAS: tl.constexpr, GAP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
        EARLY: tl.constexpr):
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
    if GAP:
        first, second = first.to(tl.float32), second.to(tl.float32)
        scale, inverse = fp8_scale(tl.maximum(largest(first, 1), largest(second, 1))[:, None])
        first, second = to_fp8(first * inverse), to_fp8(second * inverse)
        ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        real_head = (head < all_heads)[:, None]
        tl.store(scale_pointers(k_cache_ptr, kv_head, slot, ROW, BLOCK_SIZE, GAP), scale,
                 mask=real_head & is_k)
        tl.store(scale_pointers(v_cache_ptr, kv_head, slot, ROW, BLOCK_SIZE, GAP), scale,
                 mask=real_head & is_v)
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
    (k_cache, gap), (v_cache, _) = raw(k_cache), raw(v_cache)
    heads, warps = (16, 2) if num_tokens < 1024 else (32, 4)  # measured on an H200
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rotate_and_store_kernel[num_tokens, triton.cdiv(all_heads, heads)](
        qkv, qkv if x is None else x, qkv if bias is None else bias, positions, slots, rotation,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, q, k_cache, v_cache,
        eps, num_tokens, *k_cache.stride()[:2], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NORM=q_norm is not None, HEADS=heads,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2), BIAS=bias is not None, GAP=gap,
        num_warps=warps, **_scaled_by(x), **early_launch(qkv.device))
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
