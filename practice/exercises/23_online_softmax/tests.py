"""Any tiling gives the same, scores of any size stay finite, and no tile is kept."""

import weakref

import torch


def reference(q, k, v, scale):
    return torch.softmax(k @ q * scale, dim=0) @ v


def data(tokens, head_dim=16, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(head_dim, generator=g), size * torch.randn(tokens, head_dim, generator=g),
            torch.randn(tokens, head_dim, generator=g))


def cut(k, v, *lengths):
    """Tiles of the given lengths."""
    start = 0
    for length in lengths:
        yield k[start:start + length], v[start:start + length]
        start += length


def most_tiles_alive(attend):
    """How many of 64 tiles were in memory at the same time."""
    alive, most = [], 0

    def tiles():
        nonlocal most
        for _ in range(64):
            k, v = torch.randn(8, 4), torch.randn(8, 4)
            alive.append(weakref.ref(k))
            most = max(most, sum(ref() is not None for ref in alive))
            yield k, v
            del k, v

    attend(torch.randn(4), tiles(), 1.0)
    return most


def cases():
    yield "one tile", """
        q, k, v = data(7)
        attend(q, cut(k, v, 7), 0.25)                   # → reference(q, k, v, 0.25)
    """
    yield "tiles of every size give the same", """
        q, k, v = data(12)
        attend(q, cut(k, v, 4, 4, 4), 0.25)             # → reference(q, k, v, 0.25)
        attend(q, cut(k, v, 5, 5, 2), 0.25)             # → reference(q, k, v, 0.25)
        attend(q, cut(k, v, *[1] * 12), 0.25)           # → reference(q, k, v, 0.25)
        attend(q, cut(k, v, 1, 11), 0.25)               # → reference(q, k, v, 0.25)
    """
    yield "empty tiles, first, last and in the middle", """
        q, k, v = data(6)
        attend(q, cut(k, v, 0, 3, 0, 3, 0), 0.5)        # → reference(q, k, v, 0.5)
        attend(q, cut(k, v, 0, 0), 0.5)                 # → torch.zeros(16)
    """
    yield "one key", """
        q, k, v = data(1)
        attend(q, cut(k, v, 1), 0.5)                    # → v[0]
    """
    yield "the largest score comes first, and last", """
        q = torch.ones(1)
        k = torch.tensor([[9.0], [1.0], [2.0], [3.0]])
        v = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        attend(q, cut(k, v, 1, 1, 1, 1), 1.0)           # → reference(q, k, v, 1.0)
        attend(q, cut(k.flip(0), v.flip(0), 2, 2), 1.0) # → reference(q, k, v, 1.0)
    """
    yield "scores far above what exp can take", """
        q, k, v = data(9, size=100.0)
        attend(q, cut(k, v, 3, 3, 3), 10.0)             # → reference(q, k, v, 10.0)
    """
    yield "scores far below zero: all of them", """
        q = torch.ones(1)
        k, v = torch.tensor([[-1000.0], [-1001.0], [-1002.0]]), torch.tensor([[1.0], [2.0], [3.0]])
        attend(q, cut(k, v, 1, 1, 1), 1.0)              # → reference(q, k, v, 1.0)
    """
    yield "a thousand tiles, rising scores: the corrections do not pile up", """
        q = torch.ones(1)
        k, v = torch.linspace(0, 50, 1000)[:, None], torch.linspace(-1, 1, 1000)[:, None]
        attend(q, cut(k, v, *[1] * 1000), 1.0)          # → reference(q, k, v, 1.0)
    """
    yield "one pass: tiles are let go as they come", """
        most_tiles_alive(attend) <= 3                   # → True
    """
    yield "inputs are left as they were", """
        q, k, v = data(4)
        before = q.clone(), k.clone(), v.clone()
        attend(q, cut(k, v, 2, 2), 1.0)                 # → reference(q, k, v, 1.0)
        all(torch.equal(a, b) for a, b in zip((q, k, v), before))       # → True
    """
