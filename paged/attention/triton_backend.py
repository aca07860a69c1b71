"""The project's own Triton kernels as an attention backend: which kernel serves which request.

    exactly one query    decode kernel: context split over the card, query heads share the loads
    more than one        prefill kernel: query rows share the loads, causal mask on the diagonal

A mixed batch launches both; each passes over the other's requests, by looking at the lengths on the
GPU, so that nothing waits for the CPU. A caller that knows the longest query saves the launch that
would find nothing to do.
"""

from __future__ import annotations

import torch

from paged.attention import Attention, Shape
from paged.device import why_no_triton
from paged.fp8 import FP8

MAX_HEAD_DIM, MAX_GROUP = 256, 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def resolve(shape: Shape) -> Attention:
    """These kernels. Raises ValueError, with the reason, where they cannot serve."""
    reason = why_not(shape)
    if reason is not None:
        raise ValueError(reason)
    return Attention("triton", run, in_graphs=True)


def why_not(shape: Shape) -> str | None:
    """None when these kernels can serve these shapes here, else one sentence saying why not."""
    cache = shape.cache
    if (reason := why_no_triton(shape.device)) is not None:
        return reason
    if shape.dtype not in DTYPES or cache.dtype not in (*DTYPES, FP8):
        return (f"q is {shape.dtype} and the cache {cache.dtype}; the kernels take one of {DTYPES} "
                f"for each, and a cache of {FP8}")
    if cache.head_dim > MAX_HEAD_DIM or shape.num_heads > MAX_GROUP * cache.num_kv_heads:
        return (f"head_dim is {cache.head_dim} and {shape.num_heads} heads share "
                f"{cache.num_kv_heads} KV heads; the kernels take up to {MAX_HEAD_DIM}, and up to "
                f"{MAX_GROUP} heads a KV head")
    if shape.device.type != "cuda" and shape.dtype == torch.bfloat16:
        return ("Triton's interpreter multiplies bfloat16 matrices wrongly: use float32 or "
                "float16 there")
    return None


def run(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables, seq_lens,
        query_start_loc, scale: float, max_query_len: int | None = None,
        early: bool = False) -> torch.Tensor:
    """Paged attention of every request; see `Attention` and `paged_attention`. A max_query_len of 1
    makes the step a pure decode."""
    from paged.kernels.decode import decode
    from paged.kernels.prefill import prefill

    if not isinstance(query_start_loc, torch.Tensor):
        pairs = zip(query_start_loc, query_start_loc[1:])
        max_query_len = max((b - a for a, b in pairs), default=0)
    block_tables = padded(block_tables, q.device)
    seq_lens, query_start_loc = on_device(seq_lens, q.device), on_device(query_start_loc, q.device)
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()  # the heads of a token must lie side by side
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return out
    decode(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, out, early)
    if max_query_len != 1:
        prefill(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, out,
                min_queries=2)
    return out


def on_device(values, device: torch.device) -> torch.Tensor:
    """Integers as an int32 tensor on the device, laid out as the kernels read it; as it is where it
    is that already."""
    return torch.as_tensor(values).to(device, torch.int32).contiguous()


def padded(block_tables, device: torch.device) -> torch.Tensor:
    """Ragged block tables as one int32 tensor [requests, max_blocks]; what a table lacks is never
    read."""
    if isinstance(block_tables, torch.Tensor):
        return on_device(block_tables, device)
    width = max((len(table) for table in block_tables), default=0)
    return on_device([list(table) + [0] * (width - len(table)) for table in block_tables], device)
