"""FlashAttention as a backend: whichever library can read block tables here.

    flash-attn 3   flash_attn_interface   any block size       Hopper
    flash-attn 2   flash_attn             multiples of 256     Ampere and later
    PyTorch        torch.nn.attention     multiples of 256     where varlen_attn takes a
                                                               block_table (2.13)

They are tried in this order. FlashAttention-3 loads whole tiles with the copy engine where blocks
are large enough; it then weighs the unused rows of a last block with 0 instead of skipping them,
and 0 × NaN is NaN (flash-attention issues 1745 and 2374). A left padding, of 0 tokens, makes it
load row by row, with zeros for unused rows. PyTorch is asked for one split, because the automatic
choice over block tables has given NaN (torchtitan issue 3235).

Papers: FlashAttention-2 (Dao, 2023), FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from paged.attention import Attention, Shape
from paged.attention.triton_backend import on_device, padded


@dataclass(frozen=True)
class Library:
    """One implementation of FlashAttention, with what it demands of its inputs."""

    name: str
    module: str
    function: str
    block_size: int  # must divide the cache's
    table_argument: str  # without it in the signature, the function knows no block tables
    capability: tuple[int, ...]  # majors of the compute capabilities that it runs on
    call: Callable
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dim: int = 8  # must divide the model's
    max_head_dim: int = 256

    def load(self) -> Callable:
        """The library's function. Raises ValueError with the reason when there is none to use."""
        try:
            function = getattr(importlib.import_module(self.module), self.function)
        except Exception as error:  # a build for another CUDA or PyTorch fails in many ways
            missing = isinstance(error, ModuleNotFoundError) and error.name == self.module
            raise ValueError(
                f"{self.name} is not installed" if missing else
                f"{self.name} cannot be loaded ({type(error).__name__}: {error})") from error
        if self.table_argument not in inspect.signature(function).parameters:
            raise ValueError(f"{self.name} here takes no {self.table_argument}")
        return function

    def why_not(self, shape: Shape) -> str | None:
        """None when the library can serve these shapes here, else the reason."""
        if shape.device.type != "cuda":
            return f"{self.name} needs a GPU"
        try:
            self.load()
        except ValueError as error:
            return str(error)
        major, cache = torch.cuda.get_device_capability(shape.device)[0], shape.cache
        if major not in self.capability:
            return f"{self.name} does not run on compute capability {major}.x"
        if shape.dtype not in self.dtypes or cache.dtype != shape.dtype:
            return f"{self.name} takes float16 or bfloat16, not {shape.dtype} over {cache.dtype}"
        if cache.block_size % self.block_size:
            return (f"{self.name} needs a block size that is a multiple of {self.block_size}, not "
                    f"{cache.block_size}")
        if cache.head_dim % self.head_dim or cache.head_dim > self.max_head_dim:
            return (f"{self.name} needs a head_dim that is a multiple of {self.head_dim} up to "
                    f"{self.max_head_dim}, not {cache.head_dim}")
        return None


def _call_flash_3(function, q, k, v, tables, seq_lens, starts, scale, longest):
    return function(q, k, v, cache_seqlens=seq_lens, cache_leftpad=torch.zeros_like(seq_lens),
                    page_table=tables, cu_seqlens_q=starts, max_seqlen_q=longest,
                    softmax_scale=scale, causal=True)


def _call_flash_2(function, q, k, v, tables, seq_lens, starts, scale, longest):
    return function(q, k, v, starts, _cumulative(seq_lens), longest, tables.shape[1] * k.shape[1],
                    softmax_scale=scale, causal=True, block_table=tables)


def _call_torch(function, q, k, v, tables, seq_lens, starts, scale, longest):
    return function(q, k, v, starts, None, longest, tables.shape[1] * k.shape[1], scale=scale,
                    window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[2], seqused_k=seq_lens,
                    block_table=tables, num_splits=1)


LIBRARIES = (
    Library("FlashAttention-3", "flash_attn_interface", "flash_attn_with_kvcache", 1, "page_table",
            (9,), _call_flash_3),
    Library("FlashAttention-2", "flash_attn", "flash_attn_varlen_func", 256, "block_table",
            (8, 9, 10, 12), _call_flash_2),
    Library("PyTorch's varlen_attn", "torch.nn.attention.varlen", "varlen_attn", 256, "block_table",
            (8, 9, 10, 12), _call_torch),
)


def resolve(shape: Shape) -> Attention:
    """The first library that serves these shapes here. Raises ValueError with every library's
    reason where there is none."""
    reasons = []
    for library in LIBRARIES:
        reason = library.why_not(shape)
        if reason is None:
            # They read lengths and tables on the GPU, and are told upper bounds that stay.
            return Attention(f"flash ({library.name})", partial(run, library, library.load()),
                             in_graphs=True)
        reasons.append(reason)
    raise ValueError("; ".join(reasons))


def run(library: Library, function: Callable, q: torch.Tensor, k_cache: torch.Tensor,
        v_cache: torch.Tensor, block_tables, seq_lens, query_start_loc, scale: float,
        max_query_len: int | None = None, early: bool = False) -> torch.Tensor:
    """Paged attention through a library; see `Attention` and `paged_attention`. Without
    max_query_len, all rows of q bound the longest query."""
    longest = max_query_len or max(len(q), 1)
    tables = padded(block_tables, q.device)
    lengths, starts = on_device(seq_lens, q.device), on_device(query_start_loc, q.device)
    return library.call(function, q, k_cache, v_cache, tables, lengths, starts, scale, longest)


def _cumulative(seq_lens: torch.Tensor) -> torch.Tensor:
    """[requests + 1] offsets, int32."""
    return torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
