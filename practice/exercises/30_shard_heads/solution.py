import torch


def heads_of_rank(num_heads: int, num_kv_heads: int, world_size: int,
                  rank: int) -> tuple[range, range]:
    """The query heads and the KV heads of a rank."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    if num_heads % world_size:
        raise ValueError(
            f"{num_heads} query heads cannot be dealt out evenly to {world_size} ranks")
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads and {world_size} ranks do not divide each other")
    per_rank, group = num_heads // world_size, num_heads // num_kv_heads
    first = rank * per_rank
    end = first + per_rank
    return range(first, end), range(first // group, (end - 1) // group + 1)


def attend_on_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, world_size: int,
                   rank: int) -> torch.Tensor:
    """Attention of the rank's query heads over the KV heads that it keeps."""
    heads, kv_heads = heads_of_rank(q.shape[1], k.shape[1], world_size, rank)
    q = q[:, heads.start:heads.stop]
    group = len(heads) // len(kv_heads)
    k = k[:, kv_heads.start:kv_heads.stop].repeat_interleave(group, dim=1)
    v = v[:, kv_heads.start:kv_heads.stop].repeat_interleave(group, dim=1)
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
