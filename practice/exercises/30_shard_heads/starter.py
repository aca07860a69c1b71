import torch


def heads_of_rank(num_heads: int, num_kv_heads: int, world_size: int,
                  rank: int) -> tuple[range, range]:
    """The query heads and the KV heads of a rank."""
    raise NotImplementedError


def attend_on_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, world_size: int,
                   rank: int) -> torch.Tensor:
    """Attention of the rank's query heads over the KV heads that it keeps."""
    raise NotImplementedError
