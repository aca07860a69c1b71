"""The K and V tensors, cut into blocks: the physical layer.

One allocation for all layers, and each layer holds a view of it, so that one block id means the same rows in
every layer:

    [2 (K, V), num_layers, num_blocks, block_size, num_kv_heads, head_dim]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.checks import whole_number


class PagedKVCache:
    """Keys and values of every cached token of every layer.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: the shape; each at least 1 (ValueError).
        dtype, device: of the tensors.

    Attributes:
        k, v: a list with one tensor a layer, [num_blocks, block_size, num_kv_heads, head_dim].

    The memory is not cleared: nothing may be read that was not written.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        shape = dict(num_layers=num_layers, num_blocks=num_blocks, block_size=block_size,
                     num_kv_heads=num_kv_heads, head_dim=head_dim)
        shape = {name: whole_number(name, value, least=1) for name, value in shape.items()}
        self.num_blocks, self.block_size = shape["num_blocks"], shape["block_size"]
        self.num_kv_heads, self.head_dim = shape["num_kv_heads"], shape["head_dim"]
        self.data = torch.empty(2, *shape.values(), dtype=dtype, device=device)
        self.k = list(self.data[0])
        self.v = list(self.data[1])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, K and V, over all layers."""
        return self.data.nbytes // self.num_blocks

    def write(self, layer: int, slot_mapping: Sequence[int] | torch.Tensor, k: torch.Tensor,
              v: torch.Tensor) -> None:
        """Store K and V of new tokens.

        Args:
            layer: index of the layer.
            slot_mapping: [tokens] slots; a token with slot −1 is skipped (padding).
            k, v: [tokens, num_kv_heads, head_dim], any strides.

        Raises ValueError when the shapes do not fit, IndexError for a slot outside the cache.
        """
        expected = (len(slot_mapping), self.num_kv_heads, self.head_dim)
        if tuple(k.shape) != expected or tuple(v.shape) != expected:
            raise ValueError(f"K is {tuple(k.shape)} and V {tuple(v.shape)}; {expected[0]} slots of this cache "
                             f"take {expected}")
        if self.data.is_cuda:
            from paged.attention.triton_store import store  # one kernel, and no wait for the GPU
            store(k, v, self.k[layer], self.v[layer], torch.as_tensor(slot_mapping, device=self.data.device))
            return
        slots = torch.as_tensor(slot_mapping, dtype=torch.long)
        if slots.numel() == 0:
            return
        # Through PyTorch's indexing, −1 would mean the last row: drop the padding before writing.
        if slots.min() < 0:
            keep = slots != -1
            slots, k, v = slots[keep], k[keep], v[keep]
        rows = self.num_blocks * self.block_size
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
            raise IndexError(f"slots {int(slots.min())} to {int(slots.max())} do not all lie in this cache of "
                             f"{rows} rows")
        self.k[layer].flatten(0, 1)[slots] = k.to(self.data.dtype)
        self.v[layer].flatten(0, 1)[slots] = v.to(self.data.dtype)

    def gather(self, layer: int, block_table: Sequence[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first seq_len tokens of a request, each [seq_len, num_kv_heads, head_dim]."""
        return gather(self.k[layer], self.v[layer], block_table, seq_len)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in every layer: (source, destination) pairs, all read before any is written."""
        if pairs:
            sources, destinations = zip(*pairs)
            self.data[:, :, list(destinations)] = self.data[:, :, list(sources)]


def gather(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: Sequence[int],
           seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first seq_len rows of a block table, in order, out of one layer's cache.

    Raises ValueError when seq_len is negative or the table is too short for it; on a CPU, IndexError for a
    block that is not in the cache.
    """
    block_size = k_cache.shape[1]
    if seq_len < 0:
        raise ValueError(f"seq_len is {seq_len}: a context has 0 tokens or more")
    num_blocks = -(-seq_len // block_size)
    if num_blocks > len(block_table):
        raise ValueError(f"{seq_len} tokens need {num_blocks} blocks of {block_size}; the block table has "
                         f"{len(block_table)}")
    blocks = torch.as_tensor(block_table[:num_blocks], dtype=torch.long, device=k_cache.device)
    # Through PyTorch's indexing, −1 (the padding of a table) would read the last block.
    if not blocks.is_cuda and num_blocks and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(k_cache):
        raise IndexError(f"blocks {blocks.tolist()} do not all lie in this cache of {len(k_cache)} blocks")
    k = k_cache[blocks].flatten(0, 1)[:seq_len]
    v = v_cache[blocks].flatten(0, 1)[:seq_len]
    return k, v
