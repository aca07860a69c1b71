def waits(arrivals: list[float], services: list[float], seats: int,
          most: int | None = None) -> list[float | None]:
    """How long each request waits for a seat; None for one that is refused."""
    raise NotImplementedError


def in_time(waited: list[float | None], limit: float) -> int:
    """Requests that had a seat within the limit."""
    raise NotImplementedError
