"""Seats, ties, refusals that leave no trace, and what a limit does under overload."""

import random


def crowd(rate, number=2000, seed=0):
    """Arrivals of a Poisson process, and services of one second in the mean."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals, [rng.expovariate(1) for _ in range(number)]


def cases():
    yield "nobody comes", """
        waits([], [], 3)                                        # → []
        in_time([], 1)                                          # → 0
    """
    yield "who waits takes the seat that is free first", """
        waits([0, 0, 1, 1], [9, 2, 5, 1], 2)                    # → [0, 0, 1, 6]
    """
    yield "several come at once", """
        waits([5, 5, 5], [2, 2, 2], 1)                          # → [0, 2, 4]
    """
    yield "a seat that has long been free", """
        waits([0, 100, 101], [1, 5, 1], 1)                      # → [0, 0, 4]
    """
    yield "who ends at an arrival has gone", """
        waits([0, 2, 4], [2, 2, 2], 1, 1)                       # → [0, 0, 0]
    """
    yield "the refused leave no trace", """
        waits([0, 1, 1, 1, 2], [4, 9, 9, 9, 1], 1, 2)           # → [0, 3, None, None, None]
        waits([0, 1, 1, 8], [4, 9, 9, 1], 1, 2)                 # → [0, 3, None, 5]
    """
    yield "room for none", """
        waits([0, 1], [1, 1], 1, 0)                             # → [None, None]
    """
    yield "more seats than may be there", """
        waits([0, 0, 0], [5, 5, 5], 8, 2)                       # → [0, 0, None]
    """
    yield "the limit itself is in time", """
        in_time([0.5, 1.0, 1.5, None], 1.0)                     # → 2
        in_time([None, None], 9)                                # → 0
    """
    yield "one server, busy half of the time, lets wait for one service, as the law says", """
        arrivals, services = crowd(0.5, 3000)
        waited = waits(arrivals, services, 1)
        0.8 < sum(waited) / len(waited) < 1.2                   # → True
    """
    yield "under overload a limit keeps answers in time, and no limit does not", """
        arrivals, services = crowd(2.6)
        in_time(waits(arrivals, services, 2), 2) < 200          # → True
        in_time(waits(arrivals, services, 2, 4), 2) > 1200      # → True
    """
    yield "no seats", """
        waits([], [], 0)                                        # raises ValueError
    """
