"""The K and V tensors, cut into blocks: the physical layer.

One allocation for all layers, and each layer holds a view of it, so that one block id means the
same rows in every layer:

    [2 (K, V), num_layers, num_blocks, block_size, num_kv_heads, head_dim]

Of an FP8 cache it is [2, num_layers, num_blocks, bytes], and the bytes of a block hold its scales
too (`fp8.py`).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged.checks import whole_number
from paged.device import free_memory
from paged.fp8 import FP8, dequantize, part_bytes, quantize, rows_of, scales_of
from paged.memory import GiB


@dataclass(frozen=True)
class CacheSpec:
    """What a block holds: said once, for budget, allocation, copies, swap and kernels.

    Args:
        num_layers, block_size, num_kv_heads, head_dim: the shape; each at least 1 (ValueError).
        dtype: of K and V, which need not be the model's; `fp8.FP8` quantizes them.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=1))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V, over all layers, scales included."""
        shape = self.block_size, self.num_kv_heads, self.head_dim
        part = (part_bytes(*shape) if self.dtype == FP8 else math.prod(shape) * self.dtype.itemsize)
        return 2 * self.num_layers * part

    def allocate(self, num_blocks: int, device: str | torch.device = "cpu") -> PagedKVCache:
        """A cache of so many blocks. Raises MemoryError, with the numbers, if it does not fit."""
        device = torch.device(device)
        try:
            return PagedKVCache(self.num_layers, num_blocks, self.block_size, self.num_kv_heads,
                                self.head_dim, self.dtype, device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            size = num_blocks * self.block_bytes / GiB
            raise MemoryError(
                f"a pool of {num_blocks} blocks of {self.block_size} tokens takes "
                f"{size:.2f} GiB, and {free_memory(device)}: lower num_blocks") from error


class PagedKVCache:
    """Keys and values of every cached token of every layer.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: the shape; each at least 1
            (ValueError).
        dtype, device: of the tensors.

    Attributes:
        spec: what a block holds.
        k, v: a list with one tensor a layer, [num_blocks, block_size, num_kv_heads, head_dim]; of
            an FP8 cache, numbers that are still to be multiplied by their scales.
        data: the one allocation that these are views of.

    The memory is not cleared: nothing may be read that was not written.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int,
                 head_dim: int, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu"):
        self.spec = spec = CacheSpec(num_layers, block_size, num_kv_heads, head_dim, dtype)
        self.num_blocks = whole_number("num_blocks", num_blocks, least=1)
        self.block_size, self.block_bytes = spec.block_size, spec.block_bytes
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        block = spec.block_size, spec.num_kv_heads, spec.head_dim
        quantized = dtype == FP8
        self.data = torch.empty(2, spec.num_layers, self.num_blocks,
                                *((part_bytes(*block),) if quantized else block),
                                dtype=torch.uint8 if quantized else dtype, device=device)
        k, v = rows_of(self.data, *block) if quantized else self.data
        self.k, self.v = list(k), list(v)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]. ValueError if
        there is none."""
        if not 0 <= whole_number("layer", index) < len(self.k):
            raise ValueError(f"layer is {index}: this cache has layers 0 to {len(self.k) - 1}")
        return self.k[index], self.v[index]

    def write(self, layer: int, slot_mapping: Sequence[int] | torch.Tensor, k: torch.Tensor,
              v: torch.Tensor) -> None:
        """Store K and V of new tokens.

        Args:
            layer: index of the layer.
            slot_mapping: [tokens] slots; a token with slot −1 is skipped (padding).
            k, v: [tokens, num_kv_heads, head_dim], any strides.

        Raises ValueError for what does not fit together, IndexError for a slot outside the cache.
        Slots that are on a GPU are not looked at: nothing waits for it.
        """
        self.layer(layer)
        slots = integers("slot_mapping", slot_mapping)
        expected = (len(slots), self.num_kv_heads, self.head_dim)
        if tuple(k.shape) != expected or tuple(v.shape) != expected:
            raise ValueError(
                f"K is {tuple(k.shape)} and V {tuple(v.shape)}; {expected[0]} slots of this cache "
                f"take {expected}")
        if slots.is_cpu:
            check_range("slots", slots, self.num_blocks * self.block_size, "rows", least=-1)
        self.store(layer, slots.to(self.data.device), k, v)

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`write` for those who know that everything fits; slots lie where the cache does."""
        k_cache, v_cache = self.k[layer], self.v[layer]
        if self.data.is_cuda:
            from paged.kernels.store import store  # one kernel, and no wait for the GPU

            store(k, v, k_cache, v_cache, slots)
            return
        # Through PyTorch's indexing, −1 would mean the last row: drop the padding before writing.
        keep = slots >= 0
        if not keep.all():
            slots, k, v = slots[keep], k[keep], v[keep]
        put(k_cache, slots, k)
        put(v_cache, slots, v)

    def gather(self, layer: int, block_table: Sequence[int],
               seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first seq_len tokens of a request, each [seq_len, num_kv_heads,
        head_dim]; out of an FP8 cache what they stand for, in float32."""
        return gather(*self.layer(layer), block_table, seq_len)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in every layer: (source, destination) pairs, all read before any is
        written."""
        copy_between(self, self, pairs)


def copy_between(source: PagedKVCache | None, destination: PagedKVCache | None,
                 pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks from one cache to another, or to itself: (source block, destination block)
    pairs, all read before any is written. IndexError for a block that is not there."""
    if not pairs:
        return
    assert source is not None and destination is not None
    sources, destinations = zip(*pairs)
    for blocks, cache in ((sources, source), (destinations, destination)):
        check_range("blocks", integers("pairs", blocks), cache.num_blocks, "blocks")
    moved = source.data[:, :, list(sources)].to(destination.data.device)
    destination.data[:, :, list(destinations)] = moved


def gather(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: Sequence[int],
           seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first seq_len rows of a block table, in order, out of one layer's cache; of an FP8 cache
    what they stand for, in float32.

    Raises ValueError when seq_len is negative or the table is too short for it, IndexError for a
    block that is not in the cache; a table that is on a GPU is not looked at.
    """
    block_size = k_cache.shape[1]
    num_blocks = -(-whole_number("seq_len", seq_len, least=0) // block_size)
    if num_blocks > len(block_table):
        raise ValueError(
            f"{seq_len} tokens need {num_blocks} blocks of {block_size}; the block table has "
            f"{len(block_table)}")
    blocks = integers("block_table", block_table[:num_blocks])
    if blocks.is_cpu:  # through PyTorch's indexing, −1 would read the last block
        check_range("blocks", blocks, len(k_cache), "blocks")
    blocks = blocks.to(k_cache.device)
    k = take(k_cache, blocks).flatten(0, 1)[:seq_len]
    v = take(v_cache, blocks).flatten(0, 1)[:seq_len]
    return k, v


def put(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [tokens, num_kv_heads, head_dim] to their slots in one layer's K or V."""
    if cache.dtype != FP8:
        cache.flatten(0, 1)[slots] = rows.to(cache.dtype)
        return
    at = slots // cache.shape[1], slots % cache.shape[1]
    numbers, scales = quantize(rows)
    cache.view(torch.uint8)[at] = numbers.view(torch.uint8)
    scales_of(cache)[at] = scales


def take(cache: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """cache[index] of one layer's K or V, blocks or rows; of an FP8 cache what they stand for, in
    float32."""
    if cache.dtype != FP8 and len(index) == 2:  # one index is faster than two
        return cache.flatten(0, 1).index_select(0, index[0] * cache.shape[1] + index[1])
    if cache.dtype != FP8:
        return cache[index]
    return dequantize(cache.view(torch.uint8)[index].view(FP8), scales_of(cache)[index])


def integers(name: str, values: Sequence[int] | torch.Tensor, dims: int = 1) -> torch.Tensor:
    """The values as a tensor of integers with so many dimensions, where they are. ValueError if
    they are none."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{name} is {reprlib.repr(values)}: it must hold integers, as a list or a tensor"
        ) from None
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must have {dims} "
                         f"dimension{'s' * (dims > 1)}")
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()
                           or tensor.dtype == torch.bool):
        raise ValueError(f"{name} is of {tensor.dtype}: it must hold integers")
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.long()


def check_range(name: str, numbers: torch.Tensor, limit: int, unit: str, least: int = 0) -> None:
    """IndexError unless every number lies from `least` to limit − 1, in a cache of `limit`
    units."""
    if numbers.numel():
        low, high = (int(number) for number in numbers.aminmax())
        if low < least or high >= limit:
            raise IndexError(
                f"{name} {low} to {high} do not all lie in this cache of {limit} {unit}")
