"""The figures of the chapter, the edges of a block, and what no allocator can do."""

import random


def workload():
    """The 200 requests of the chapter."""
    rng = random.Random(0)
    return [(rng.randint(100, 2000), rng.randint(20, 1500)) for _ in range(200)]


def cases():
    yield "the 200 requests of the chapter, reserved", """
        utilization_reserved(workload(), 4096)      # ≈ 0.462
    """
    yield "the 200 requests of the chapter, paged", """
        utilization_paged(workload(), 1)            # ≈ 1.000
        utilization_paged(workload(), 16)           # ≈ 0.996
        utilization_paged(workload(), 64)           # ≈ 0.983
        utilization_paged(workload(), 256)          # ≈ 0.932
    """
    yield "a request that fills its last block exactly gets no block more", """
        utilization_paged([(4, 4)], 4)              # → 1.0
        utilization_paged([(4, 3)], 4)              # → 0.875
        utilization_paged([(4, 5)], 4)              # → 0.75
    """
    yield "prompt and output share a block", """
        utilization_paged([(1, 1)], 2)              # → 1.0
        utilization_paged([(3, 2)], 5)              # → 1.0
    """
    yield "a request as long as the maximum fits", """
        utilization_reserved([(5, 3)], 8)           # → 1.0
    """
    yield "no requests", """
        utilization_reserved([], 8)                 # → 1.0
        utilization_paged([], 8)                    # → 1.0
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
        utilization_reserved(requests, 8)           # → 0.8125
        utilization_paged(requests, 4)              # → 0.8125
        requests                                    # → [(3, 2), (1, 7)]
    """
