def projections_without_cache(context: int, steps: int) -> int:
    """Q, K and V projections when every step projects the whole sequence again."""
    raise NotImplementedError


def projections_with_cache(context: int, steps: int) -> int:
    """Q, K and V projections when K and V are kept."""
    raise NotImplementedError
