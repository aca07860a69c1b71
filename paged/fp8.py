"""Eight bits a number: rows of K and V as FP8, each with a scale of its own.

A byte of e4m3 has a sign, four bits of exponent and three of mantissa:

    s eeee mmm      0, ± 0.002 (2⁻⁹) … ± 448; eight numbers in each doubling; no infinity

Rounding changes a number by at most one part in 16, wherever it lies between 2⁻⁶ and 448. A row
[head_dim] is first divided by a scale that puts its largest number at 448; the scale is kept too:

    x  ≈  FP8(x / scale) × scale            scale = max |x| / 448

A row is what one token has in one KV head. It is quantized once, when it is written, from itself
alone: nothing has to be measured beforehand, and no later token changes it. `quantize` and
`dequantize` are the specification; the kernels do the same.

    a block of K (or V) in one layer:
    │ block_size × num_kv_heads × head_dim bytes │ num_kv_heads × block_size scales, float32 │ pad │

The scales are part of the block, so who copies, shares or swaps a block takes them along.

Format: OCP 8-bit Floating Point Specification (2023); Micikevicius et al., 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
TINY = 2.0**-126
"""The smallest scale: float32's smallest normal number, of which the inverse is a number too."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] as FP8, and the scale of each, float32 [...].

    Rounds to nearest, ties to even. A row of zeros has zeros and a scale of TINY. A row that holds
    NaN or infinity has the scale NaN, and is read as NaN: nothing that is broken looks whole.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest < torch.inf, (largest / LARGEST).clamp(min=TINY), torch.nan)
    scaled = (x * (1 / scale)[..., None]).clamp(-LARGEST, LARGEST)
    return scaled.to(FP8), scale


def dequantize(rows: Tensor, scales: Tensor) -> Tensor:
    """What quantized rows [..., head_dim] with their scales [...] stand for, in float32."""
    return rows.float() * scales[..., None]


def part_bytes(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of K, or of V, of a block in one layer. A multiple of 16, so that every block can be
    read in the widest loads."""
    rows = block_size * num_kv_heads
    return -(-(_scales_at(rows * head_dim) + 4 * rows) // 16) * 16


def _scales_at(row_bytes: int) -> int:
    """Where the scales of a block begin, behind so many bytes of rows: float32 wants multiples of
    4."""
    return -(-row_bytes // 4) * 4


def rows_of(parts: Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """The rows of blocks [..., part_bytes] of bytes, as FP8 [..., block_size, num_kv_heads,
    head_dim]."""
    shape = block_size, num_kv_heads, head_dim
    return parts[..., :block_size * num_kv_heads * head_dim].view(FP8).unflatten(-1, shape)


def scales_of(cache: Tensor) -> Tensor:
    """The scales behind the rows of a layer's FP8 cache [num_blocks, block_size, num_kv_heads,
    head_dim], as a float32 view [num_blocks, block_size, num_kv_heads]."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    at = cache.storage_offset() + _scales_at(block_size * num_kv_heads * head_dim)
    raw = cache.view(torch.uint8).as_strided((num_blocks, num_kv_heads, block_size, 4),
                                             (cache.stride(0), 4 * block_size, 4, 1), at)
    return raw.view(torch.float32).squeeze(-1).transpose(1, 2)
