def utilization_reserved(requests: list[tuple[int, int]], max_model_len: int) -> float:
    """Percent of the rows that are used when every request reserves max_model_len rows."""
    raise NotImplementedError


def utilization_paged(requests: list[tuple[int, int]], block_size: int) -> float:
    """Percent of the rows that are used when every request holds whole blocks of block_size rows."""
    raise NotImplementedError
