def check_request(num_prompt_tokens: int, max_tokens: int, max_model_len: int, num_blocks: int,
                  block_size: int) -> int:
    """Blocks that a request may come to need. Raises ValueError for a request that can never
    end."""
    raise NotImplementedError


def admit(waiting: list[tuple[str, int]], num_free: int, free_seats: int, budget: int,
          block_size: int) -> list[tuple[str, int]]:
    """The waiting requests that are let in, each with the tokens of its first chunk."""
    raise NotImplementedError
