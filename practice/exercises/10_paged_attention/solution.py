import torch


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    block_tables: list[list[int]], seq_lens: list[int], query_start_loc: list[int],
                    scale: float) -> torch.Tensor:
    """Causal attention of every request's queries over its own blocks; [N, num_heads, head_dim]
    like q."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for i, (table, seq_len) in enumerate(zip(block_tables, seq_lens)):
        start, end = query_start_loc[i], query_start_loc[i + 1]
        if start == end:
            continue
        blocks = torch.tensor(table, dtype=torch.long)
        keys = k_cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(group, dim=1)
        values = v_cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * scale
        first = seq_len - (end - start)  # position of the first query
        visible = torch.arange(seq_len) <= first + torch.arange(end - start)[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out
