def append_block(block_table: list[int], num_tokens: int, block_size: int,
                 free_blocks: list[int]) -> bool:
    """Make room for token number num_tokens, with at most one new block; False if there is none."""
    raise NotImplementedError
