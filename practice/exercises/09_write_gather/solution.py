import torch


def write(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping, k: torch.Tensor,
          v: torch.Tensor) -> None:
    """Put row i of k and v into slot slot_mapping[i], in place; slot -1 is skipped."""
    slots = torch.as_tensor(slot_mapping, dtype=torch.long, device=k_cache.device)
    rows = k_cache.shape[0] * k_cache.shape[1]
    if ((slots < -1) | (slots >= rows)).any():
        raise ValueError(f"slots {slots.tolist()} do not fit a cache of {rows} rows")
    keep = slots >= 0
    k_cache.flatten(0, 1)[slots[keep]] = k[keep]
    v_cache.flatten(0, 1)[slots[keep]] = v[keep]


def gather(k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: list[int],
           seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first seq_len rows of a request, as copies."""
    room = len(block_table) * k_cache.shape[1]
    if seq_len > room:
        raise ValueError(f"{seq_len} tokens do not fit a table of {room} rows")
    blocks = torch.tensor(block_table, dtype=torch.long, device=k_cache.device)
    k, v = (cache[blocks].flatten(0, 1)[:seq_len] for cache in (k_cache, v_cache))
    return k, v
