def plan_step(running: list[tuple[str, int, int]], budget: int) -> dict[str, int]:
    """Tokens that each request computes in the next step; decodes first, then chunks of prompts."""
    if budget < 1:
        raise ValueError(f"budget is {budget}: with less than one token a step nothing happens")
    wants = [(name, tokens - computed) for name, tokens, computed in running if tokens > computed]
    plan = {}
    for name, left in sorted(wants,
                             key=lambda want: want[1] > 1):  # decodes first; the sort is stable
        if budget == 0:
            break
        plan[name] = min(left, budget)
        budget -= plan[name]
    return plan
