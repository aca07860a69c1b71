"""Tests for == 1: never true for block size 1, and true twice for a token that is asked for twice."""

def append_block(block_table: list[int], num_tokens: int, block_size: int, free_blocks: list[int]) -> bool:
    """Make room for token number num_tokens, with at most one new block; False if there is none."""
    if num_tokens % block_size != 1:
        return True
    if not free_blocks:
        return False
    block_table.append(free_blocks.pop(0))
    return True
