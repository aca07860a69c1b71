"""Takes the longest step for all of them."""

def projections_without_cache(context: int, steps: int) -> int:
    """Q, K and V projections when every step projects the whole sequence again."""
    _check(context, steps)
    return 3 * steps * (context + steps - 1)


def projections_with_cache(context: int, steps: int) -> int:
    """Q, K and V projections when K and V are kept."""
    _check(context, steps)
    return 3 * context + 3 * steps


def _check(context, steps):
    if context < 0 or steps < 0:
        raise ValueError(f"context {context} and steps {steps} must not be negative")
