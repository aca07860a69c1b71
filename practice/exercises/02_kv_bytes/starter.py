def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of K and V of one token over all layers."""
    raise NotImplementedError


def concurrent_requests(budget_bytes: int, bytes_per_token: int, context: int,
                        block_size: int) -> int:
    """Requests of `context` tokens that fit the budget when each holds whole blocks."""
    raise NotImplementedError
