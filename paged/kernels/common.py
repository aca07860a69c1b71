"""What the Triton kernels share: reading a tile through a block table, the card, counters, and
launching."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from paged.device import device_properties

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
    return tl.load(pointers, mask=(tl.arange(0, PADDED_DIM) < HEAD_DIM)[None, :], other=0.0)


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
