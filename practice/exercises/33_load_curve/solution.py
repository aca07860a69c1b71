def waits(arrivals: list[float], services: list[float], seats: int,
          most: int | None = None) -> list[float | None]:
    """How long each request waits for a seat; None for one that is refused."""
    if seats < 1:
        raise ValueError(f"seats is {seats}: with none, everybody waits for ever")
    free_at = [0.0] * seats
    ends: list[float] = []
    waited: list[float | None] = []
    for arrival, service in zip(arrivals, services):
        there = sum(end > arrival for end in ends)
        if most is not None and there >= most:
            waited.append(None)
            continue
        seat = min(range(seats), key=free_at.__getitem__)
        start = max(arrival, free_at[seat])
        free_at[seat] = start + service
        ends.append(start + service)
        waited.append(start - arrival)
    return waited


def in_time(waited: list[float | None], limit: float) -> int:
    """Requests that had a seat within the limit."""
    return sum(wait is not None and wait <= limit for wait in waited)
