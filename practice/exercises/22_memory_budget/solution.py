def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
                dtype_bytes: int) -> int:
    """Bytes of one block: K and V of block_size tokens in all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype_bytes


def num_blocks(total: float, utilization: float, used: float, peak: float, current: float,
               bytes_of_a_block: int) -> int:
    """Whole blocks that fit beside everything else. Raises ValueError when not even one does."""
    blocks = int((total * utilization - used - peak + current) // bytes_of_a_block)
    if blocks < 1:
        raise ValueError(
            f"{total * utilization:.0f} bytes may be used, and {used + peak - current:.0f} are "
            f"needed for other things: no room for a block of {bytes_of_a_block}")
    return blocks
