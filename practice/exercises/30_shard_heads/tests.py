"""Every head once, copies of KV heads only where they are needed, and the parts against the
whole."""

import torch


def data(num_heads, num_kv_heads, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, num_heads, 8, generator=g), torch.randn(
        7, num_kv_heads, 8, generator=g), torch.randn(7, num_kv_heads, 8, generator=g))


def reference(q, k, v, scale):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def together(attend_on_rank, heads_of_rank, num_heads, num_kv_heads, world_size):
    """The outputs of all ranks, each computed with NaN in every head that is not its own."""
    q, k, v = data(num_heads, num_kv_heads)
    parts = []
    for rank in range(world_size):
        own_q, own_kv = heads_of_rank(num_heads, num_kv_heads, world_size, rank)
        masked = []
        for tensor, own in ((q, own_q), (k, own_kv), (v, own_kv)):
            masked.append(torch.full_like(tensor, torch.nan))
            masked[-1][:, own.start:own.stop] = tensor[:, own.start:own.stop]
        parts.append(attend_on_rank(*masked, 0.3, world_size, rank))
    return torch.cat(parts, dim=1)


def cases():
    yield "one rank has everything", """
        heads_of_rank(16, 8, 1, 0)                      # → (range(0, 16), range(0, 8))
    """
    yield "16 query heads and 8 KV heads on 2, 4 and 8 ranks", """
        heads_of_rank(16, 8, 2, 1)                      # → (range(8, 16), range(4, 8))
        heads_of_rank(16, 8, 4, 2)                      # → (range(8, 12), range(4, 6))
        heads_of_rank(16, 8, 8, 7)                      # → (range(14, 16), range(7, 8))
    """
    yield "more ranks than KV heads: copies, in neighbouring ranks", """
        [heads_of_rank(16, 8, 16, rank)[1] for rank in (0, 1, 2, 15)]   # → [
                                            #    range(0, 1), range(0, 1), range(1, 2), range(7, 8)]
        [heads_of_rank(8, 1, 4, rank)[1] for rank in range(4)]              # → [range(0, 1)] * 4
    """
    yield "every query head is somewhere, once", """
        [h for rank in range(4) for h in heads_of_rank(12, 4, 4, rank)[0]]      # → list(range(12))
        [h for rank in range(6) for h in heads_of_rank(12, 2, 6, rank)[0]]      # → list(range(12))
    """
    yield "query heads that cannot be dealt out evenly", """
        heads_of_rank(9, 3, 2, 0)                       # raises ValueError
        heads_of_rank(8, 2, 16, 0)                      # raises ValueError
    """
    yield "KV heads that would have to be cut", """
        heads_of_rank(12, 6, 4, 0)                      # raises ValueError
        heads_of_rank(12, 4, 6, 0)                      # raises ValueError
        heads_of_rank(12, 3, 2, 0)                      # raises ValueError
    """
    yield "a rank that does not exist", """
        heads_of_rank(8, 2, 2, 2)                       # raises ValueError
        heads_of_rank(8, 2, 2, -1)                      # raises ValueError
    """
    yield "the parts are the whole: heads divided, and heads copied", """
        together(attend_on_rank, heads_of_rank, 8, 2, 1)            # → reference(*data(8, 2), 0.3)
        together(attend_on_rank, heads_of_rank, 8, 2, 2)            # → reference(*data(8, 2), 0.3)
        together(attend_on_rank, heads_of_rank, 8, 2, 4)            # → reference(*data(8, 2), 0.3)
        together(attend_on_rank, heads_of_rank, 8, 2, 8)            # → reference(*data(8, 2), 0.3)
        together(attend_on_rank, heads_of_rank, 12, 4, 2)           # → reference(*data(12, 4), 0.3)
        together(attend_on_rank, heads_of_rank, 4, 4, 4)            # → reference(*data(4, 4), 0.3)
    """
    yield "a rank's output has its own heads only", """
        list(attend_on_rank(*data(8, 2), 1.0, 4, 3).shape)          # → [3, 2, 8]
    """
    yield "what a rank keeps: no more KV heads than its queries use", """
        [len(heads_of_rank(16, 8, world, 0)[1]) for world in (1, 2, 4, 8, 16)]   # → [8, 4, 2, 1, 1]
    """
