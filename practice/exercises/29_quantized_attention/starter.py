import torch


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scales: torch.Tensor,
           v_scales: torch.Tensor, block_table: list[int], length: int,
           scale: float) -> torch.Tensor:
    """Attention of one new token over the first `length` tokens of its block table."""
    raise NotImplementedError
