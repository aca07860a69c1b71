"""Order, leftovers, budgets around the block size, and a prompt that is worked off in chunks."""


def run_to_the_end(plan_step, requests, budget):
    """Plan steps until everything is computed; the plan of each step."""
    computed, plans = {name: done for name, _, done in requests}, []
    while any(computed[name] < tokens for name, tokens, _ in requests):
        assert len(plans) < 1000, "after 1,000 steps the requests are still not computed"
        plan = plan_step([(name, tokens, computed[name]) for name, tokens, _ in requests], budget)
        assert sum(plan.values()
                   ) <= budget, f"step {len(plans)} computes {plan}, over the budget of {budget}"
        for name, tokens in plan.items():
            computed[name] += tokens
        plans.append(plan)
    return plans


def cases():
    yield "nobody runs", """
        plan_step([], 8)                                    # → {}
    """
    yield "requests that have nothing left to compute", """
        plan_step([("a", 5, 5), ("b", 6, 5), ("c", 3, 3)], 8)       # → {"b": 1}
    """
    yield "decodes do not wait for a prompt that came first", """
        plan_step([("prompt", 1000, 0), ("decode", 10, 9)], 64)     # → {"decode": 1, "prompt": 63}
    """
    yield "what one prompt leaves, the next one uses", """
        plan_step([("a", 3, 0), ("b", 9, 0), ("c", 9, 0)], 10)      # → {"a": 3, "b": 7}
    """
    yield "the budget ends exactly at the end of a prompt", """
        plan_step([("a", 4, 0), ("b", 4, 0)], 4)            # → {"a": 4}
        plan_step([("a", 4, 0), ("b", 4, 0)], 5)            # → {"a": 4, "b": 1}
    """
    yield "more decodes than budget: the first ones to arrive", """
        plan_step([("a", 2, 1), ("b", 9, 0), ("c", 5, 4), ("d", 7, 6)], 2)  # → {"a": 1, "c": 1}
    """
    yield "a prompt of 12 in chunks, with budgets of 4, 3, 5 and 1", """
        [plan["a"] for plan in run_to_the_end(plan_step, [("a", 12, 0)], 4)]    # → [4, 4, 4]
        [plan["a"] for plan in run_to_the_end(plan_step, [("a", 12, 0)], 3)]    # → [3, 3, 3, 3]
        [plan["a"] for plan in run_to_the_end(plan_step, [("a", 12, 0)], 5)]    # → [5, 5, 2]
        len(run_to_the_end(plan_step, [("a", 12, 0)], 1))                       # → 12
    """
    yield "a prompt whose last token is left counts as a decode", """
        plan_step([("a", 9, 0), ("b", 4, 3)], 1)            # → {"b": 1}
    """
    yield "a mixed batch to its end", """
        run_to_the_end(plan_step, [("a", 9, 0), ("b", 3, 2), ("c", 4, 0)], 5)   # → [
                                                        #    {"b": 1, "a": 4}, {"a": 5}, {"c": 4}]
    """
    yield "everything in one step, with budget to spare", """
        plan_step([("a", 9, 2), ("b", 3, 2)], 1000)         # → {"b": 1, "a": 7}
    """
    yield "a negative budget", """
        plan_step([], -1)                                   # raises ValueError
    """
    yield "the list of requests is left as it was", """
        running = [("a", 9, 2), ("b", 3, 2)]
        plan_step(running, 3)                               # → {"b": 1, "a": 2}
        running                                             # → [("a", 9, 2), ("b", 3, 2)]
    """
