"""Counts K and V only, as if the query cost nothing."""

def projections_without_cache(context: int, steps: int) -> int:
    """Q, K and V projections when every step projects the whole sequence again."""
    _check(context, steps)
    return sum(2 * (context + step) for step in range(steps))


def projections_with_cache(context: int, steps: int) -> int:
    """Q, K and V projections when K and V are kept."""
    _check(context, steps)
    return 2 * context + 2 * steps


def _check(context, steps):
    if context < 0 or steps < 0:
        raise ValueError(f"context {context} and steps {steps} must not be negative")
