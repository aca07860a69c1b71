"""Attention that reads K and V through block tables: one signature, several backends.

    reference   the specification, in PyTorch, one request at a time
    torch       batched PyTorch: what the engine uses on a CPU
    triton      this project's own GPU kernels; also run, slowly, in Triton's interpreter
    flash       FlashAttention, from the flash-attn package or from PyTorch itself

A backend is a module with `resolve(shape)`: it returns an Attention that serves these shapes here,
or raises ValueError with the reason why it cannot. That is asked once, when an engine is made; what
is returned runs in every layer, without checks. A new backend is a new module and one name in
BACKENDS.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from paged.kv_cache import CacheSpec, integers

BACKENDS = {
    "flash": "paged.attention.flash",
    "triton": "paged.attention.triton_backend",
    "torch": "paged.attention.torch_sdpa",
    "reference": "paged.attention.reference",
}


@dataclass(frozen=True)
class Shape:
    """What attention is asked to serve.

    Attributes:
        num_heads: of the queries.
        dtype: of the queries.
        cache: what it reads.
        device: where both are.
    """

    num_heads: int
    dtype: torch.dtype
    cache: CacheSpec
    device: torch.device


@dataclass(frozen=True)
class Attention:
    """A backend that serves a Shape.

    Attributes:
        name: for people to read: "triton", "flash (PyTorch's varlen_attn)".
        run: (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale) -> out, see
            `paged_attention`; q and the caches fit the Shape. It takes two keywords: max_query_len,
            the longest query of the batch where the caller knows it, and early: lengths and offsets
            are older than the kernel launched before, so that it may start while that one ends.
        in_graphs: run may be captured in a CUDA graph: it depends on shapes alone.
    """

    name: str
    run: Callable[..., torch.Tensor]
    in_graphs: bool = False


def resolve(backend: str, shape: Shape) -> Attention:
    """The attention of that name, or with "auto" the fastest that serves the shape here.

    Raises ValueError, with the reason, when there is none.
    """
    if backend == "auto":
        # Triton's interpreter is for checking kernels, not for serving: auto wants a GPU for it.
        names: Sequence[str] = ("triton", "flash", "torch")
        names = names if shape.device.type == "cuda" else names[-1:]
    elif isinstance(backend, str) and backend in BACKENDS:
        names = (backend,)
    else:
        raise ValueError(f"unknown attention backend {backend!r}: choose one of auto, "
                         f"{', '.join(BACKENDS)}")
    reason = None
    for name in names:
        try:
            return importlib.import_module(BACKENDS[name]).resolve(shape)
        except ValueError as error:
            reason = error
    raise ValueError(f"attention backend {backend!r} cannot run here: {reason}")


def paged_attention(q: torch.Tensor, kv, layer: int,
                    block_tables: Sequence[Sequence[int]] | torch.Tensor,
                    seq_lens: Sequence[int] | torch.Tensor,
                    query_start_loc: Sequence[int] | torch.Tensor, scale: float,
                    backend: str = "reference") -> torch.Tensor:
    """Causal attention of new tokens over the paged K/V of their requests.

    Args:
        q: [N, num_heads, head_dim], the new tokens of all requests, one request after the other.
        kv: a PagedKVCache; the K and V of the new tokens are already written.
        layer: index of the layer.
        block_tables: one list of blocks a request, or an int32 tensor [requests, max_blocks].
        seq_lens: tokens of each request's context, the new ones included. 0 is allowed: its rows
            give zeros.
        query_start_loc: requests + 1 offsets into q; request i has the rows from i to i + 1,
            possibly none.
        scale: factor on the scores, usually head_dim ** −0.5.
        backend: a name in BACKENDS, or "auto" for the fastest that runs here.

    Returns [N, num_heads, head_dim]. A request's queries are the last tokens of its context:
    decode, whole prefill, chunked prefill and mixtures differ in nothing but their lengths. Raises
    ValueError for inputs that do not fit together and for a backend that cannot run them, the same
    from every backend. Of tables and lengths on a GPU only types and shapes are looked at: nothing
    waits for it.
    """
    _check_query(q, kv)
    k_cache, v_cache = kv.layer(layer)
    if not (isinstance(scale, Real) and 0 < scale < math.inf):
        raise ValueError(f"scale is {scale!r}: it must be a finite number above 0, usually "
                         f"head_dim ** -0.5")
    _check_batch(len(q), kv, block_tables, seq_lens, query_start_loc)
    attention = resolve(backend, Shape(q.shape[1], q.dtype, kv.spec, q.device))
    return attention.run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, float(scale))


def _check_query(q, kv) -> None:
    if not isinstance(q, torch.Tensor) or not q.is_floating_point() or q.device != kv.data.device:
        what = f"{q.dtype} on {q.device}" if isinstance(q,
                                                        torch.Tensor) else f"a {type(q).__name__}"
        raise ValueError(
            f"q is {what}: it must be a floating-point tensor on {kv.data.device}, where the "
            f"cache is")
    if q.dim() != 3 or q.shape[2] != kv.head_dim or q.shape[1] == 0 or q.shape[1] % kv.num_kv_heads:
        raise ValueError(
            f"q is {tuple(q.shape)}; this cache needs [tokens, a multiple of {kv.num_kv_heads} "
            f"heads, {kv.head_dim}]")


def _check_batch(num_tokens: int, kv, block_tables, seq_lens, query_start_loc) -> None:
    """Nothing here may wait for the GPU: of what is there, types and shapes only."""
    tables = _tables(block_tables)
    lengths = _on_host(integers("seq_lens", seq_lens))
    starts = _on_host(integers("query_start_loc", query_start_loc))
    if not len(tables) == len(lengths) == len(starts) - 1:
        raise ValueError(
            f"{len(tables)} block tables, {len(lengths)} lengths and {len(starts)} offsets: a "
            f"batch of n requests has n, n and n + 1")
    if isinstance(starts, torch.Tensor):
        return
    if starts[0] != 0 or starts[-1] != num_tokens or any(a > b for a, b in zip(starts, starts[1:])):
        raise ValueError(f"query_start_loc {starts} must rise from 0 to the {num_tokens} rows of q")
    if isinstance(lengths, torch.Tensor):
        return
    for request, seq_len in enumerate(lengths):
        num_queries = starts[request + 1] - starts[request]
        if seq_len < 0 or seq_len and num_queries > seq_len:
            raise ValueError(
                f"request {request} has {num_queries} queries and a context of {seq_len} tokens")
        if num_queries and isinstance(tables, list):
            _check_table(request, tables[request], seq_len, kv)


def _check_table(request: int, table: list[int], seq_len: int, kv) -> None:
    needed = -(-seq_len // kv.block_size)
    if len(table) < needed:
        raise ValueError(
            f"request {request}: {seq_len} tokens need {needed} blocks of {kv.block_size}; the "
            f"block table has {len(table)}")
    for block in table[:needed]:
        if not 0 <= block < kv.num_blocks:
            raise ValueError(
                f"request {request} has block {block} in its table: this cache has blocks 0 to "
                f"{kv.num_blocks - 1}")


def _tables(block_tables) -> list[list[int]] | torch.Tensor:
    if isinstance(block_tables, torch.Tensor):
        return _on_host(integers("block_tables", block_tables, dims=2))
    if not hasattr(block_tables, "__len__"):
        raise ValueError(
            f"block_tables is {block_tables!r}: it must be one list of blocks a request, or a "
            f"tensor")
    return [
        integers(f"block_tables[{request}]", table).tolist()
        for request, table in enumerate(block_tables)
    ]


def _on_host(values: torch.Tensor) -> list | torch.Tensor:
    """The values as a list; those on a GPU stay there."""
    return values.tolist() if values.is_cpu else values
