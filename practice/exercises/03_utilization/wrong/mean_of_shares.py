"""Averages the requests' own shares: short requests weigh as much as long ones."""


def utilization_reserved(requests, max_model_len):
    if any(p + o > max_model_len for p, o in requests):
        raise ValueError
    return _mean([(p + o) / max_model_len for p, o in requests])


def utilization_paged(requests, block_size):
    if block_size < 1:
        raise ValueError
    return _mean([(p + o) / (-(-(p + o) // block_size) * block_size) for p, o in requests])


def _mean(values):
    return sum(values) / len(values) if values else 1.0
