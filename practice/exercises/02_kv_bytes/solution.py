def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of K and V of one token over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def concurrent_requests(budget_bytes: int, bytes_per_token: int, context: int,
                        block_size: int) -> int:
    """Requests of `context` tokens that fit the budget when each holds whole blocks."""
    if context < 1 or block_size < 1:
        raise ValueError(f"context {context} and block_size {block_size} must be at least 1")
    blocks = -(-context // block_size)
    return budget_bytes // (blocks * block_size * bytes_per_token)
