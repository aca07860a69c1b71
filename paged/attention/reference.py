"""Paged attention as a specification: gather each request's rows, then ordinary attention in
float32.

Slow and obvious. Every other backend is held to it, and it is held to contiguous SDPA.
"""

from __future__ import annotations

import torch

from paged.attention import Attention, Shape
from paged.kv_cache import gather


def resolve(shape: Shape) -> Attention:
    """The reference runs everywhere."""
    return Attention("reference", run)


def run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, max_query_len=None,
        early=False) -> torch.Tensor:
    """Attention of each request's new queries over its paged context; see `paged_attention` for the
    shapes."""
    out = torch.zeros_like(q)
    group_size = q.shape[1] // k_cache.shape[2]  # query heads that share a KV head
    starts = [int(start) for start in query_start_loc]
    for request, seq_len in enumerate(int(n) for n in seq_lens):
        first, last = starts[request], starts[request + 1]
        num_queries = last - first
        if num_queries == 0 or seq_len == 0:
            continue
        if num_queries > seq_len:
            raise ValueError(
                f"request {request} has {num_queries} queries and a context of {seq_len} tokens")
        keys, values = gather(k_cache, v_cache, block_tables[request], seq_len)
        keys = keys.float().repeat_interleave(group_size, dim=1)  # [seq_len, num_heads, head_dim]
        values = values.float().repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * scale

        # The queries are the last tokens of the context: query i sits at position seq_len −
        # num_queries + i.
        positions = torch.arange(seq_len, device=q.device)
        future = positions[None, :] > positions[seq_len - num_queries:, None]
        scores = scores.masked_fill(future, float("-inf"))
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out
