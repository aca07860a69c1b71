import torch


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    block_tables: list[list[int]], seq_lens: list[int], query_start_loc: list[int],
                    scale: float) -> torch.Tensor:
    """Causal attention of every request's queries over its own blocks; [N, num_heads, head_dim]
    like q."""
    raise NotImplementedError
