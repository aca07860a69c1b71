def append_block(block_table: list[int], num_tokens: int, block_size: int,
                 free_blocks: list[int]) -> bool:
    """Make room for token number num_tokens, with at most one new block; False if there is none."""
    if len(block_table) * block_size >= num_tokens:
        return True
    if not free_blocks:
        return False
    block_table.append(free_blocks.pop(0))
    return True
