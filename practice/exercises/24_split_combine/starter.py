import torch


def partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one part of the context, and the log of its sum of exponentials."""
    raise NotImplementedError


def combine(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Attention over all parts together."""
    raise NotImplementedError
