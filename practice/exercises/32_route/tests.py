"""The longest prefix, gaps, ties, the bound to the request, and many requests one after another."""

import math


def longest(hashes, held):
    count = 0
    while count < len(hashes) and hashes[count] in held:
        count += 1
    return count


def serve(route, prompts, num_replicas, bound):
    """Sends prompts one after the other, none of which ends; where each one went. Checks every
    choice."""
    cached, loads, went = [set() for _ in range(num_replicas)], [0] * num_replicas, []
    for prompt in prompts:
        replica = route(prompt, [set(held) for held in cached], list(loads), bound)
        most = math.ceil(bound * (sum(loads) + 1) / num_replicas)
        assert loads[replica] < most, f"{prompt} goes to replica {replica}, which has no room"
        best = max(longest(prompt, held) for held, load in zip(cached, loads) if load < most)
        found = longest(prompt, cached[replica])
        assert found == best, f"{prompt} finds {found} blocks, {best} could be had"
        cached[replica].update(prompt)
        loads[replica] += 1
        went.append(replica)
    return went


def cases():
    yield "nobody has anything: the fewest requests, then the first", """
        route(["a"], [set(), set(), set()], [2, 1, 1], 1.5)         # → 1
        route(["a"], [set(), set(), set()], [0, 0, 0], 1.5)         # → 0
    """
    yield "one replica gets everything", """
        route(["a"], [set()], [7], 1)                               # → 0
    """
    yield "the longest prefix wins over the fewest requests", """
        route(["a", "b", "c"], [set(), {"a"}, {"a", "b"}], [0, 1, 2], 3)    # → 2
    """
    yield "blocks behind a gap are worth nothing", """
        route(["a", "b", "c"], [{"b", "c"}, {"a"}], [1, 1], 2)      # → 1
        route(["a", "b", "c", "d"], [{"a", "c", "d"}, {"a", "b"}], [1, 1], 2)   # → 1
    """
    yield "other prompts' blocks are worth nothing", """
        route(["a", "b"], [{"x", "y", "z"}, {"a"}], [1, 1], 2)      # → 1
    """
    yield "equal prefixes: the fewest requests, then the first", """
        route(["a", "b"], [{"a"}, {"a"}, {"a"}], [2, 1, 1], 2)      # → 1
        route(["a", "b"], [{"a", "b"}, {"a", "b"}], [1, 1], 2)      # → 0
    """
    yield "the second best, where the best has no room", """
        route(["a", "b"], [{"a", "b"}, {"a"}, set()], [5, 2, 0], 1.25)      # → 1
    """
    yield "the bound counts this request: with it, exactly at the bound is room", """
        route(["a"], [{"a"}, set(), set(), set()], [1, 1, 1, 0], 2)     # → 0
        route(["a"], [{"a"}, set(), set(), set()], [2, 1, 0, 0], 2)     # → 2
        route(["a"], [{"a"}, set()], [2, 1], 1)                         # → 1
    """
    yield "an idle fleet takes the first request, however strict the bound", """
        route(["a"], [set(), {"a"}], [0, 0], 1)                     # → 1
    """
    yield "a prompt that fills no block", """
        route([], [{"a"}, {"b"}], [3, 2], 2)                        # → 1
    """
    yield "one popular prefix: shared out, and never beyond the bound", """
        prompts = [["a", f"b{i}"] for i in range(12)]
        sorted(serve(route, prompts, 4, 1))                         # → sorted([0, 1, 2, 3] * 3)
        len(set(serve(route, prompts, 4, 2)))                       # → 2
    """
    yield "conversations stay where they are as long as there is room", """
        serve(route, [["a"], ["b"], ["c"], ["a", "a2"], ["c", "c2"], ["b", "b2"]], 3, 1.5)  # → [
                                                                            #    0, 1, 2, 0, 2, 1]
    """
    yield "a bound below 1", """
        route(["a"], [{"a"}], [0], 0.5)                             # raises ValueError
    """
    yield "what was given is left as it was", """
        hashes, cached, loads = ["a", "b"], [{"a"}, set()], [1, 0]
        route(hashes, cached, loads, 3)                             # → 0
        hashes, loads                                               # → (["a", "b"], [1, 0])
        cached                                                      # → [{"a"}, set()]
    """
