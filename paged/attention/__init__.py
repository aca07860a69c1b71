"""Attention that reads K and V through block tables: one signature, several backends.

    reference   the specification, in PyTorch, one request at a time
    torch       batched PyTorch: what the engine uses on a CPU
    triton      this project's own GPU kernels; also run, slowly, in Triton's interpreter
    flash       FlashAttention, from the flash-attn package or from PyTorch itself

Each backend is a module with `run(...)` over tensors and `why_not(q, k_cache)`, which says in a sentence why it
cannot serve these inputs here, or None. A new backend is a new module and one name in BACKENDS.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

BACKENDS = {
    "flash": "paged.attention.flash",
    "triton": "paged.attention.triton_backend",
    "torch": "paged.attention.torch_sdpa",
    "reference": "paged.attention.reference",
}


def paged_attention(q: torch.Tensor, kv, layer: int, block_tables: Sequence[Sequence[int]] | torch.Tensor,
                    seq_lens: Sequence[int] | torch.Tensor, query_start_loc: Sequence[int] | torch.Tensor,
                    scale: float, backend: str = "reference") -> torch.Tensor:
    """Causal attention of new tokens over the paged K/V of their requests.

    Args:
        q: [N, num_heads, head_dim], the new tokens of all requests, one request after the other.
        kv: a PagedKVCache; the K and V of the new tokens are already written.
        layer: index of the layer.
        block_tables: one list of blocks a request, or an int32 tensor [requests, max_blocks].
        seq_lens: tokens of each request's context, the new ones included. 0 is allowed: its rows give zeros.
        query_start_loc: requests + 1 offsets into q; request i has the rows from i to i + 1, possibly none.
        scale: factor on the scores, usually head_dim ** −0.5.
        backend: a name in BACKENDS, or "auto" for the fastest that runs here.

    Returns [N, num_heads, head_dim]. A request's queries are the last tokens of its context: decode, whole
    prefill, chunked prefill and mixtures differ in nothing but their lengths.
    Raises ValueError for inputs that do not fit together and for a backend that cannot run them. Tables and
    lengths are looked at where they are lists; of tensors the shapes only, so that nothing waits for a GPU.
    """
    _check_inputs(q, kv, block_tables, seq_lens, query_start_loc)
    k_cache, v_cache = kv.k[layer], kv.v[layer]
    _, module = choose_backend(q, k_cache, backend)
    return module.run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale)


def choose_backend(q: torch.Tensor, k_cache: torch.Tensor, backend: str = "auto"):
    """The name and module of the backend that will serve these inputs.

    Raises ValueError, with the reason, when the named backend cannot.
    """
    if backend == "auto":
        # Triton's interpreter is for checking kernels, not for serving: auto wants it on a GPU only.
        names = ("triton", "flash", "torch") if q.is_cuda else ("torch",)
    elif backend in BACKENDS:
        names = (backend,)
    else:
        raise ValueError(f"unknown attention backend {backend!r}: choose one of auto, {', '.join(BACKENDS)}")
    for name in names:
        module = importlib.import_module(BACKENDS[name])
        reason = module.why_not(q, k_cache)
        if reason is None:
            return name, module
    raise ValueError(f"attention backend {backend!r} cannot run here: {reason}")


def _check_inputs(q, kv, block_tables, seq_lens, query_start_loc) -> None:
    """Nothing here may wait for the GPU: of tensors the shapes only."""
    if q.dim() != 3 or q.shape[2] != kv.head_dim or q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"q is {tuple(q.shape)}; this cache needs [tokens, a multiple of {kv.num_kv_heads} "
                         f"heads, {kv.head_dim}]")
    if not len(block_tables) == len(seq_lens) == len(query_start_loc) - 1:
        raise ValueError(f"{len(block_tables)} block tables, {len(seq_lens)} lengths and {len(query_start_loc)} "
                         f"offsets: a batch of n requests has n, n and n + 1")
    if isinstance(query_start_loc, torch.Tensor) or isinstance(seq_lens, torch.Tensor):
        return
    starts = list(query_start_loc)
    if starts[0] != 0 or starts[-1] != len(q) or any(a > b for a, b in zip(starts, starts[1:])):
        raise ValueError(f"query_start_loc {starts} must rise from 0 to the {len(q)} rows of q")
    for request, seq_len in enumerate(seq_lens):
        num_queries = starts[request + 1] - starts[request]
        if seq_len and num_queries > seq_len:
            raise ValueError(f"request {request} has {num_queries} queries and a context of {seq_len} tokens")
        if num_queries:
            _check_table(request, block_tables[request], seq_len, kv)


def _check_table(request: int, block_table, seq_len: int, kv) -> None:
    needed = -(-seq_len // kv.block_size)
    if len(block_table) < needed:
        raise ValueError(f"request {request}: {seq_len} tokens need {needed} blocks of {kv.block_size}; the block "
                         f"table has {len(block_table)}")
    if isinstance(block_table, torch.Tensor):
        return
    for block in block_table[:needed]:
        if not 0 <= block < kv.num_blocks:
            raise ValueError(f"request {request} has block {block} in its table: this cache has blocks 0 to "
                             f"{kv.num_blocks - 1}")
