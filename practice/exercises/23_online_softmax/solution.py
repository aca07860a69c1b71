from collections.abc import Iterator

import torch


def attend(q: torch.Tensor, tiles: Iterator[tuple[torch.Tensor, torch.Tensor]],
           scale: float) -> torch.Tensor:
    """Attention of one query over keys and values that come tile by tile."""
    largest, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros_like(q)
    for k, v in tiles:
        if len(k) == 0:
            continue
        scores = k @ q * scale
        new = torch.maximum(largest, scores.max())
        fix = torch.exp(largest - new)  # 0 for the first tile
        weights = torch.exp(scores - new)
        total = total * fix + weights.sum()
        acc = acc * fix + weights @ v
        largest = new
    return acc / total if total > 0 else acc
