"""Any split gives the same as no split, with empty parts and with scores of any size."""

import torch


def reference(q, k, v, scale):
    weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) * scale, dim=-1)
    return torch.einsum("hk,khd->hd", weights, v)


def data(tokens, heads=3, head_dim=8, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(heads, head_dim,
                        generator=g), size * torch.randn(tokens, heads, head_dim, generator=g),
            torch.randn(tokens, heads, head_dim, generator=g))


def in_parts(partial, combine, q, k, v, scale, *lengths):
    """The context cut into parts of the given lengths, and put together again."""
    parts = [partial(q, kp, vp, scale) for kp, vp in zip(k.split(lengths), v.split(lengths))]
    return combine(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def cases():
    yield "one part is attention", """
        q, k, v = data(9)
        partial(q, k, v, 0.5)[0]                                    # → reference(q, k, v, 0.5)
        partial(q, k, v, 0.5)[1]                        # → (0.5 * torch.einsum("hd,khd->hk", q, k))
                                                                    #    .logsumexp(dim=-1)
    """
    yield "equal parts, unequal parts, single tokens", """
        q, k, v = data(12)
        in_parts(partial, combine, q, k, v, 0.5, 4, 4, 4)           # → reference(q, k, v, 0.5)
        in_parts(partial, combine, q, k, v, 0.5, 1, 9, 2)           # → reference(q, k, v, 0.5)
        in_parts(partial, combine, q, k, v, 0.5, *[1] * 12)         # → reference(q, k, v, 0.5)
        in_parts(partial, combine, q, k, v, 0.5, 12)                # → reference(q, k, v, 0.5)
    """
    yield "empty parts", """
        q, k, v = data(5)
        partial(q, k[:0], v[:0], 0.5)[0]                            # → torch.zeros(3, 8)
        partial(q, k[:0], v[:0], 0.5)[1].tolist()                   # → [-torch.inf] * 3
        in_parts(partial, combine, q, k, v, 0.5, 0, 3, 0, 2, 0)     # → reference(q, k, v, 0.5)
    """
    yield "nothing but empty parts: zeros, not NaN", """
        combine(torch.zeros(2, 3, 8), torch.full((2, 3), -torch.inf))       # → torch.zeros(3, 8)
    """
    yield "the output of an empty part is not used, whatever it holds", """
        outs = torch.tensor([[[1.0]], [[torch.nan]]])
        combine(outs, torch.tensor([[0.5], [-torch.inf]])).item()   # → 1.0
    """
    yield "scores far above what exp can take", """
        q, k, v = data(8, size=300.0)
        in_parts(partial, combine, q, k, v, 1.0, 3, 5)              # → reference(q, k, v, 1.0)
    """
    yield "scores far below zero", """
        k = torch.tensor([-900.0, -901.0, -902.0]).view(3, 1, 1)
        q, v = torch.ones(1, 1), data(3, 1, 1)[2]
        in_parts(partial, combine, q, k, v, 1.0, 1, 2)              # → reference(q, k, v, 1.0)
    """
    yield "each head has weights of its own", """
        outs = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
        lses = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        combine(outs, lses).flatten().tolist()                      # → [1.0, 2.0]
    """
    yield "combining combined parts", """
        q, k, v = data(10)
        parts = [partial(q, k[a:b], v[a:b], 0.5) for a, b in ((0, 3), (3, 4), (4, 10))]
        outs, lses = (torch.stack(x) for x in zip(*parts))
        first = combine(outs[:2], lses[:2]), torch.logsumexp(lses[:2], dim=0)
        pairs = zip(first, (outs[2], lses[2]))
        combine(*(torch.stack(pair) for pair in pairs))             # → reference(q, k, v, 0.5)
    """
    yield "inputs are left as they were", """
        outs, lses = torch.ones(2, 1, 1), torch.tensor([[0.0], [-torch.inf]])
        combine(outs, lses).item()                                  # → 1.0
        (outs.flatten().tolist(), lses.flatten().tolist())       # → ([1.0, 1.0], [0.0, -torch.inf])
    """
