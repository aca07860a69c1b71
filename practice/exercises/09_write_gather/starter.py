import torch


def write(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping, k: torch.Tensor,
          v: torch.Tensor) -> None:
    """Put row i of k and v into slot slot_mapping[i], in place; slot -1 is skipped."""
    raise NotImplementedError


def gather(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: list[int],
           seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first seq_len rows of a request, as copies."""
    raise NotImplementedError
