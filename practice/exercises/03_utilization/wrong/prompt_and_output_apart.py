"""Rounds prompt and output up on their own, as if an output never went on in the prompt's last block."""


def utilization_reserved(requests, max_model_len):
    if any(p + o > max_model_len for p, o in requests):
        raise ValueError
    rows = len(requests) * max_model_len
    return sum(p + o for p, o in requests) / rows if rows else 1.0


def utilization_paged(requests, block_size):
    if block_size < 1:
        raise ValueError
    blocks = sum(-(-p // block_size) + -(-o // block_size) for p, o in requests)
    return sum(p + o for p, o in requests) / (blocks * block_size) if blocks else 1.0
