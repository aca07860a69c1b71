"""Cuts a request that is too long down to the maximum instead of refusing it."""


def utilization_reserved(requests, max_model_len):
    rows = len(requests) * max_model_len
    return sum(min(p + o, max_model_len) for p, o in requests) / rows if rows else 1.0


def utilization_paged(requests, block_size):
    if block_size < 1:
        raise ValueError
    rows = sum(-(-(p + o) // block_size) * block_size for p, o in requests)
    return sum(p + o for p, o in requests) / rows if rows else 1.0
