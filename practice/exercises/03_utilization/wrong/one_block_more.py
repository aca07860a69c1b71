"""tokens // block_size + 1: a request that fills its last block exactly gets an empty block."""


def utilization_reserved(requests, max_model_len):
    if any(p + o > max_model_len for p, o in requests):
        raise ValueError
    rows = len(requests) * max_model_len
    return sum(p + o for p, o in requests) / rows if rows else 1.0


def utilization_paged(requests, block_size):
    if block_size < 1:
        raise ValueError
    rows = sum(((p + o) // block_size + 1) * block_size for p, o in requests)
    return sum(p + o for p, o in requests) / rows if rows else 1.0
