"""More rows than a tile, requests without rows, tables that are slices, and slots past 32 bits."""

import os

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def ints(values):
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def reference(tables, starts, positions, block_size):
    """The same in a loop."""
    tables, starts, positions = tables.tolist(), starts.tolist(), positions.tolist()
    return [
        tables[r][p // block_size] * block_size + p % block_size for r in range(len(tables))
        for p in positions[starts[r]:starts[r + 1]]
    ]


def batch(lengths, block_size=4, first=0, seed=0):
    """Tables, starts and positions of requests that compute so many tokens each."""
    width = max([1, *(-(-(first + n) // block_size) for n in lengths)])
    g = torch.Generator().manual_seed(seed)
    tables = torch.randperm(len(lengths) * width, generator=g).view(len(lengths), width)
    positions = [p for n in lengths for p in range(first, first + n)]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return ints(tables.tolist()), ints(starts), ints(positions)


def agrees(compute_slots, *args):
    got, expected = compute_slots(*args), reference(*args)
    assert got.dtype == torch.int64, f"the slots are {got.dtype}, expected torch.int64"
    wrong = [i for i, (a, b) in enumerate(zip(got.tolist(), expected)) if a != b]
    assert not wrong, (
        f"{len(wrong)} of {len(expected)} slots are wrong, the first in row {wrong[0]}: "
        f"expected {expected[wrong[0]]}, got {got.tolist()[wrong[0]]}")
    return len(expected)


def cases():
    yield "one request, less than a tile", """
        agrees(compute_slots, *batch([5]), 4)                       # → 5
    """
    yield "exactly a tile, one more, and many", """
        agrees(compute_slots, *batch([16]), 4)                      # → 16
        agrees(compute_slots, *batch([17]), 4)                      # → 17
        agrees(compute_slots, *batch([100]), 4)                     # → 100
    """
    yield "no request writes into the rows of the next", """
        agrees(compute_slots, *batch([3, 20, 1, 33, 7]), 4)         # → 64
    """
    yield "decodes: one row each, deep in the table", """
        agrees(compute_slots, *batch([1, 1, 1], first=30), 4)       # → 3
    """
    yield "requests without rows, first, last and in the middle", """
        agrees(compute_slots, *batch([0, 4, 0, 0, 2, 0]), 4)        # → 6
        agrees(compute_slots, *batch([0]), 4)                       # → 0
    """
    yield "block sizes of 1, 3 and 256", """
        agrees(compute_slots, *batch([9, 4], 1), 1)                 # → 13
        agrees(compute_slots, *batch([9, 4], 3), 3)                 # → 13
        agrees(compute_slots, *batch([300, 4], 256), 256)           # → 304
    """
    yield "tables that are a slice of a wider tensor", """
        tables, starts, positions = batch([6, 9])
        wide = torch.cat([tables, tables.flip(0) + 100], dim=1)[:, :tables.shape[1]]
        agrees(compute_slots, wide, starts, positions, 4)           # → 15
    """
    yield "a slot that does not fit 32 bits", """
        compute_slots(ints([[2**30]]), ints([0, 1]), ints([5]), 16).tolist()       # → [17179869189]
    """
    yield "the kernel writes no row beyond its request", """
        slots = torch.full((24,), -7, dtype=torch.int64, device=DEVICE)
        slots_kernel[(1,)](ints([[2, 0]]), ints([0, 5]), ints(range(24)), slots, 2, BLOCK_SIZE=4,
                           TILE=16)
        slots[:8].tolist()                                         # → [8, 9, 10, 11, 0, -7, -7, -7]
    """
    yield "no requests", """
        compute_slots(ints([]).view(0, 4), ints([0]), ints([]), 4).tolist()        # → []
    """
    yield "inputs are left as they were", """
        tables, starts, positions = batch([6, 9])
        before = tables.clone(), starts.clone(), positions.clone()
        agrees(compute_slots, tables, starts, positions, 4)         # → 15
        all(torch.equal(a, b) for a, b in zip((tables, starts, positions), before))        # → True
    """
