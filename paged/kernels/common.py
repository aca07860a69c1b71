"""What the Triton kernels share: reading a tile through a block table, the card, counters, and
launching."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from paged.device import device_properties
from paged.fp8 import FP8

LOG2_E: tl.constexpr = tl.constexpr(
    1.4426950408889634)  # exp(x) = exp2(x × log2 e); exp2 is one instruction


@triton.jit
def tile_slots(tile, length, table_ptr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Slots of the tokens tile × TILE … of a context of `length` tokens, [TILE].

        token           0   1   2   3   4   5   6   7   8  …         (BLOCK_SIZE = 3)
        token // 3      0   0   0   1   1   1   2   2   2  …         logical block
        table           7   7   7   1   1   1   4   4   4  …         physical block
        slot           21  22  23   3   4   5  12  13  14  …         block × BLOCK_SIZE + offset

    Past the end the last token stands in: its row is known to hold numbers, where an unused row may
    hold NaN, and 0 × NaN is NaN. An empty context gives slot 0.
    """
    token = tl.maximum(tl.minimum(tile * TILE + tl.arange(0, TILE), length - 1), 0)
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=length > 0, other=0)
    return block * BLOCK_SIZE + token % BLOCK_SIZE


@triton.jit
def load_rows(base, slots, ROW: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Cache rows of these slots, [TILE, PADDED_DIM]; `base` points at the KV head in row 0, [1,
    PADDED_DIM].

    Offsets are in 64 bits: a pool of K or V passes 2³¹ elements.
    """
    pointers = base + (slots.to(tl.int64) * ROW)[:, None]
    if HEAD_DIM == PADDED_DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tl.arange(0, PADDED_DIM) < HEAD_DIM)[None, :], other=0)


@triton.jit
def load_numbers(base, slots, dtype, ROW: tl.constexpr, HEAD_DIM: tl.constexpr,
                 PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GAP: tl.constexpr,
                 CONVERTS: tl.constexpr):
    """`load_rows` in the dtype of q, of a plain cache or of an FP8 one.

    There GAP bytes, the scales, lie between the rows of a block and those of the next, and what is
    returned is still to be multiplied by `load_scales`. GAP is 0 in a plain cache.
    """
    if GAP:
        block = base + ((slots // BLOCK_SIZE).to(tl.int64) * GAP)[:, None]
        return from_fp8(load_rows(block, slots, ROW, HEAD_DIM, PADDED_DIM), CONVERTS).to(dtype)
    return load_rows(base, slots, ROW, HEAD_DIM, PADDED_DIM).to(dtype)


@triton.jit
def load_scales(cache_ptr, kv_head, slots, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                GAP: tl.constexpr, CONVERTS: tl.constexpr):
    """What the rows of these slots are to be multiplied by, [TILE] in float32."""
    scales = tl.load(scale_pointers(cache_ptr, kv_head, slots, ROW, BLOCK_SIZE, GAP))
    return scales if CONVERTS else 256 * scales


@triton.jit
def scale_pointers(cache_ptr, kv_head, slots, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                   GAP: tl.constexpr):
    """Where the scales of these slots are, see `fp8.py`; slots and KV heads in shapes that fit each
    other."""
    behind_rows: tl.constexpr = (BLOCK_SIZE * ROW + 3) // 4 * 4
    block: tl.constexpr = (BLOCK_SIZE * ROW + GAP) // 4
    scales = (cache_ptr + behind_rows).to(tl.pointer_type(tl.float32))
    return (scales +
            (slots // BLOCK_SIZE).to(tl.int64) * block + kv_head * BLOCK_SIZE + slots % BLOCK_SIZE)


@triton.jit
def from_fp8(byte, CONVERTS: tl.constexpr):
    """The number of each byte in float16, where the card converts; else over 256, the bits moved to
    where float16 has them, its exponents 8 apart.

        FP8         s eeee mmm
        float16     s 0eeee mmm0000000

    NaN becomes a number; its scale is NaN.
    """
    if CONVERTS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = byte.to(tl.int16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)


@triton.jit
def in_float16(q):
    """Rows of q for products with FP8 numbers, which float16 holds exactly: each over its largest
    number, and that, [rows]. float32, for checking, stays as it is."""
    wide = q.to(tl.float32)
    if q.dtype == tl.float32:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)
    size = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
    return (wide / size[:, None]).to(tl.float16), size


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """max |x|, infinity where there is a NaN."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), AXIS)


@triton.jit
def fp8_scale(largest):
    """The scale of rows with these largest numbers, and its inverse; `fp8.quantize` says how."""
    scale = tl.maximum(tl.math.div_rn(largest, 448.0), 1.1754943508222875e-38)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    return scale, tl.math.div_rn(1.0, scale)


@triton.jit
def to_fp8(x):
    """float32 as the bytes of the nearest FP8, ties to even, what lies beyond 448 as 448.

    Half a step is added to the bits before they are cut. Below 2⁻⁶, where the steps no longer
    shrink, float32's adder rounds: beside 2¹⁴ its own steps are as wide.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    cut = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(size < 0.015625, small, cut) | sign).to(tl.uint8)


@triton.jit
def start_early(EARLY: tl.constexpr):
    """Programmatic dependent launch: a kernel may start while the one before it ends, and does here
    what needs no result of that one. Behind this line everything before it is finished and
    visible."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def early_launch(device: torch.device) -> dict:
    """Launch options of a kernel that calls `start_early`, where the device can."""
    return {"EARLY": True, "launch_pdl": True
            } if device_properties(device).starts_early else {"EARLY": False}


@cache
def _zeros(device: torch.device, stream: int | None) -> torch.Tensor:
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


def counters(device: torch.device) -> torch.Tensor:
    """Zeros for the programs of a kernel to count themselves with, [16384] int32; a kernel leaves
    them zeros.

    Kernels that use them must follow each other, as on a stream they do: there is one array a
    stream, and one for all graphs of a device, which are therefore to be replayed one after
    another.
    """
    if device.type != "cuda":
        return torch.zeros(1 << 14,
                           dtype=torch.int32)  # always new: an interruption may leave counts behind
    for_graphs = _zeros(device, None)  # made by the first call, which no graph may capture
    if torch.cuda.is_current_stream_capturing():
        return for_graphs
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream)


def raw(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A layer's K or V as kernels take it, and the bytes between the rows of its blocks; see
    `load_numbers`."""
    if cache.dtype != FP8:
        return cache, 0
    return cache.view(torch.uint8), cache.stride(0) - cache.stride(1) * cache.shape[1]


_compiled: dict = {}


def launch(kernel, grid: tuple[int, int, int], tensors: tuple, numbers: tuple, strides: tuple,
           constants: tuple, **options) -> None:
    """Start a Triton kernel whose parameters are tensors, numbers, strides and constants, in this
    order.

    Does what `kernel[grid](...)` does, in half the time from the second call of a kind on: Triton
    analyses every argument of every call, which takes longer than a small decode step. A kernel
    compiled once serves all calls with the same constants, strides and types, as long as every
    tensor begins at a multiple of 16 bytes; it must be declared not to specialize on its numbers.
    """
    if not tensors[0].is_cuda:
        kernel[grid](*tensors, *numbers, *strides, *constants, **options)
        return
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    key = (kernel, tensors[0].device, *[tensor.dtype for tensor in tensors], addresses % 16,
           strides, constants, *options.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*tensors, *numbers, *strides, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, *strides, *constants, **options)
    if addresses % 16 == 0:
        _compiled[key] = compiled
