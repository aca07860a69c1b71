"""Tests for == 0: takes a block when the last one has just filled."""

def append_block(block_table: list[int], num_tokens: int, block_size: int, free_blocks: list[int]) -> bool:
    """Make room for token number num_tokens, with at most one new block; False if there is none."""
    if num_tokens % block_size != 0:
        return True
    if not free_blocks:
        return False
    block_table.append(free_blocks.pop(0))
    return True
