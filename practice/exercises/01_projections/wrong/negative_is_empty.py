"""Leaves negative numbers to range, which makes nothing of them."""

def projections_without_cache(context: int, steps: int) -> int:
    """Q, K and V projections when every step projects the whole sequence again."""
    return sum(3 * (context + step) for step in range(steps))


def projections_with_cache(context: int, steps: int) -> int:
    """Q, K and V projections when K and V are kept."""
    return 3 * context + 3 * steps


def _check(context, steps):
    if context < 0 or steps < 0:
        raise ValueError(f"context {context} and steps {steps} must not be negative")
