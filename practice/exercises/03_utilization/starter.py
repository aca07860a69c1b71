def utilization_reserved(requests: list[tuple[int, int]], max_model_len: int) -> float:
    """Share of the rows that is used when every request reserves max_model_len rows."""
    raise NotImplementedError


def utilization_paged(requests: list[tuple[int, int]], block_size: int) -> float:
    """Share of the rows that is used when every request holds whole blocks of block_size rows."""
    raise NotImplementedError
