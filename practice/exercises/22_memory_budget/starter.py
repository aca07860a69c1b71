def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
                dtype_bytes: int) -> int:
    """Bytes of one block: K and V of block_size tokens in all layers."""
    raise NotImplementedError


def num_blocks(total: float, utilization: float, used: float, peak: float, current: float,
               bytes_of_a_block: int) -> int:
    """Whole blocks that fit beside everything else. Raises ValueError when not even one does."""
    raise NotImplementedError
