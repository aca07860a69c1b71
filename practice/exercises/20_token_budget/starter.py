def plan_step(running: list[tuple[str, int, int]], budget: int) -> dict[str, int]:
    """Tokens that each request computes in the next step; decodes first, then chunks of prompts."""
    raise NotImplementedError
