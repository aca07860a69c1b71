"""Paged attention in batched PyTorch: the engine's backend where there is no GPU.

Decodes are done all at once: their rows are gathered into one padded tensor, and padding repeats
the last valid row, so that no unwritten row is ever read. Longer queries go through SDPA one
request at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged.attention import Attention, Shape
from paged.kv_cache import gather, take


def resolve(shape: Shape) -> Attention:
    """PyTorch's SDPA runs everywhere."""
    return Attention("torch", run)


def run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, max_query_len=None,
        early=False) -> torch.Tensor:
    """Attention of each request's new queries over its paged context; see `paged_attention` for the
    shapes."""
    lengths, starts = _as_list(seq_lens), _as_list(query_start_loc)
    out = torch.zeros_like(q)
    decodes = []
    for request, seq_len in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        if last - first > seq_len:
            raise ValueError(
                f"request {request} has {last - first} queries and a context of {seq_len} tokens")
        if last - first == 1:
            decodes.append(request)
            continue
        keys, values = gather(k_cache, v_cache, block_tables[request], seq_len)
        out[first:last] = _prefill(q[first:last], keys.to(q.dtype), values.to(q.dtype), scale)
    if decodes:
        rows = [starts[request] for request in decodes]
        all_rows = len(rows) == len(q)
        result = _decode(q if all_rows else q[rows], k_cache, v_cache, _padded(
            block_tables, decodes), [lengths[request] for request in decodes], scale)
        if all_rows:
            return result
        out[rows] = result
    return out


def _prefill(q, keys, values, scale) -> torch.Tensor:
    """q: [queries, num_heads, head_dim], the last tokens of a context of [seq_len, num_kv_heads,
    head_dim]."""
    num_queries, seq_len = len(q), len(keys)
    mask = None
    if num_queries < seq_len:
        positions = torch.arange(seq_len, device=q.device)
        mask = positions[None, :] <= positions[seq_len - num_queries:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None], attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode(q, k_cache, v_cache, tables, lengths, scale) -> torch.Tensor:
    """q: [requests, num_heads, head_dim], one query each.

    The query heads of a KV head take the place of the queries, so that K and V are not repeated for
    them.
    """
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    longest = max(lengths)
    if longest > tables.shape[1] * block_size:
        raise ValueError(
            f"a context of {longest} tokens does not fit tables of {tables.shape[1]} blocks of "
            f"{block_size}")
    seq_lens = torch.tensor(lengths)[:, None]
    positions = torch.arange(longest).expand(num_requests, longest)
    valid = positions < seq_lens
    positions = torch.minimum(positions, seq_lens - 1)
    at = [
        index.flatten().to(q.device)
        for index in (tables.gather(1, positions // block_size).long(), positions % block_size)
    ]
    keys, values = (take(cache, *at).to(q.dtype).view(num_requests, longest, num_kv_heads,
                                                      head_dim).transpose(1, 2)
                    for cache in (k_cache, v_cache))
    mask = None if min(lengths) == longest else valid[:, None, None, :].to(q.device)
    out = F.scaled_dot_product_attention(q.reshape(num_requests, num_kv_heads, -1, head_dim), keys,
                                         values, attn_mask=mask, scale=scale)
    return out.reshape(num_requests, num_heads, head_dim)


def _padded(block_tables, requests) -> torch.Tensor:
    """Block tables of these requests as an int64 tensor, short ones filled up with zeros that are
    never read."""
    if isinstance(block_tables, torch.Tensor):
        return block_tables[requests].long().cpu()
    tables = [list(block_tables[request]) for request in requests]
    longest = max(map(len, tables))
    return torch.tensor([table + [0] * (longest - len(table)) for table in tables])


def _as_list(values) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else [int(value) for value in values]
