import torch


def partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one part of the context, and the log of its sum of exponentials."""
    scores = torch.einsum("hd,khd->hk", q, k) * scale
    if scores.shape[1] == 0:
        return torch.zeros_like(q), torch.full_like(q[:, 0], -torch.inf)
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)


def combine(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Attention over all parts together."""
    largest = lses.max(dim=0).values
    largest = torch.where(largest == -torch.inf, 0.0, largest)  # all parts empty: avoid inf - inf
    weights = torch.exp(lses - largest)[:, :, None]  # 0 for an empty part
    outs = torch.where(weights == 0, 0.0, outs)  # 0 times NaN would be NaN
    return (weights * outs).sum(dim=0) / weights.sum(dim=0).clamp(min=1e-30)
