import torch


def piece_of_rank(weight: torch.Tensor, bias: torch.Tensor, world_size: int,
                  rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The columns of the weight for the rank's inputs, and the bias, if this rank adds it."""
    raise NotImplementedError


def partial_product(x: torch.Tensor, weight: torch.Tensor,
                    bias: torch.Tensor | None) -> torch.Tensor:
    """The rank's part of every output."""
    raise NotImplementedError
