import torch


def piece_of_rank(weight: torch.Tensor, bias: torch.Tensor, world_size: int,
                  rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The columns of the weight for the rank's inputs, and the bias, if this rank adds it."""
    inputs = weight.shape[1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    if inputs % world_size:
        raise ValueError(f"{inputs} inputs cannot be dealt out evenly to {world_size} ranks")
    per_rank = inputs // world_size
    columns = weight[:, rank * per_rank:(rank + 1) * per_rank]
    return columns, bias if rank == 0 else None


def partial_product(x: torch.Tensor, weight: torch.Tensor,
                    bias: torch.Tensor | None) -> torch.Tensor:
    """The rank's part of every output."""
    product = x @ weight.T
    return product if bias is None else product + bias
