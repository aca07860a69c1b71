def check_request(num_prompt_tokens: int, max_tokens: int, max_model_len: int, num_blocks: int,
                  block_size: int) -> int:
    """Blocks that a request may come to need. Raises ValueError for a request that can never
    end."""
    if num_prompt_tokens < 1:
        raise ValueError("the prompt is empty")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: there is nothing to generate")
    cached = num_prompt_tokens + max_tokens - 1  # the last token is never cached
    if cached > max_model_len:
        raise ValueError(f"{cached} tokens are more than max_model_len, which is {max_model_len}")
    blocks = -(-cached // block_size)
    if blocks > num_blocks:
        raise ValueError(f"needs {blocks} blocks, the pool has {num_blocks}")
    return blocks


def admit(waiting: list[tuple[str, int]], num_free: int, free_seats: int, budget: int,
          block_size: int) -> list[tuple[str, int]]:
    """The waiting requests that are let in, each with the tokens of its first chunk."""
    admitted = []
    for name, num_prompt_tokens in waiting:
        if not free_seats or not budget:
            break
        blocks = -(-num_prompt_tokens // block_size)  # for all of it, not for the chunk alone
        if blocks > num_free:
            break
        num_tokens = min(num_prompt_tokens, budget)
        num_free -= blocks
        free_seats -= 1
        budget -= num_tokens
        admitted.append((name, num_tokens))
    return admitted
