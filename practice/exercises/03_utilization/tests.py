"""The figures of the chapter, the edges of a block, and what no allocator can do."""

import random


def workload():
    """The 200 requests of the chapter."""
    rng = random.Random(0)
    return [(rng.randint(100, 2000), rng.randint(20, 1500)) for _ in range(200)]


def cases():
    yield "the 200 requests of the chapter, reserved", """
        utilization_reserved(workload(), 4096)      # ≈ 46.2
    """
    yield "the 200 requests of the chapter, paged", """
        utilization_paged(workload(), 1)            # ≈ 100.0
        utilization_paged(workload(), 16)           # ≈ 99.6
        utilization_paged(workload(), 64)           # ≈ 98.3
        utilization_paged(workload(), 256)          # ≈ 93.2
    """
    yield "a request that fills its last block exactly gets no block more", """
        utilization_paged([(4, 4)], 4)              # → 100.0
        utilization_paged([(4, 3)], 4)              # → 87.5
        utilization_paged([(4, 5)], 4)              # → 75.0
    """
    yield "prompt and output share a block", """
        utilization_paged([(1, 1)], 2)              # → 100.0
        utilization_paged([(3, 2)], 5)              # → 100.0
    """
    yield "a request as long as the maximum fits", """
        utilization_reserved([(5, 3)], 8)           # → 100.0
    """
    yield "no requests", """
        utilization_reserved([], 8)                 # → 100.0
        utilization_paged([], 8)                    # → 100.0
    """
    yield "one impossible request among possible ones", """
        utilization_reserved([(1, 1), (8, 1), (2, 2)], 8)   # raises ValueError
    """
    yield "a block size below 1, even with no requests", """
        utilization_paged([], 0)                    # raises ValueError
        utilization_paged([(3, 2)], -4)             # raises ValueError
    """
    yield "the list of requests is left as it was", """
        requests = [(3, 2), (1, 7)]
        utilization_reserved(requests, 8)           # → 81.25
        utilization_paged(requests, 4)              # → 81.25
        requests                                    # → [(3, 2), (1, 7)]
    """
