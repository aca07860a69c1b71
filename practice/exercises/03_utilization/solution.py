def utilization_reserved(requests: list[tuple[int, int]], max_model_len: int) -> float:
    """Share of the rows that is used when every request reserves max_model_len rows."""
    for prompt, output in requests:
        if prompt + output > max_model_len:
            raise ValueError(
                f"a request of {prompt + output} tokens is longer than {max_model_len}")
    return _share(requests, len(requests) * max_model_len)


def utilization_paged(requests: list[tuple[int, int]], block_size: int) -> float:
    """Share of the rows that is used when every request holds whole blocks of block_size rows."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: a block holds at least one token")
    blocks = sum(-(-(prompt + output) // block_size) for prompt, output in requests)
    return _share(requests, blocks * block_size)


def _share(requests, rows):
    used = sum(prompt + output for prompt, output in requests)
    return used / rows if rows else 1.0
