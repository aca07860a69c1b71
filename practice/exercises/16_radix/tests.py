"""Where edges split, which slots win, and random prompts against a plain dictionary of prefixes."""

import random


def walk(tree, steps, seed):
    """Random prompts over three tokens, held against a dictionary of all prefixes. Raises
    AssertionError."""
    rng = random.Random(seed)
    slot_of, prompts, fresh = {}, [], 0
    for step in range(steps):
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 7))]
        known = next((n for n in range(len(tokens), 0, -1) if tuple(tokens[:n]) in slot_of), 0)
        expected = [slot_of[tuple(tokens[:n])] for n in range(1, known + 1)]
        got = tree.match(list(tokens))
        assert got == expected, f"step {step}: match({tokens}) gave {got}, expected {expected}"
        if rng.random() < 0.6:
            slots = list(range(fresh, fresh + len(tokens)))
            fresh += len(tokens)
            got = tree.insert(list(tokens), slots)
            assert got == known, f"step {step}: insert({tokens}, ...) gave {got}, expected {known}"
            for n, slot in enumerate(slots, 1):
                slot_of.setdefault(tuple(tokens[:n]), slot)
            prompts.append(tuple(tokens))
        nodes = count_nodes(slot_of, prompts)
        assert tree.num_nodes(
        ) == nodes, f"step {step}: num_nodes() is {tree.num_nodes()}, expected {nodes}"
    return "as expected"


def count_nodes(prefixes, prompts):
    """Nodes of the smallest tree in which an edge ends where prompts part or where one has been
    extended."""
    ends, stored = set(), set()
    for prompt in prompts:
        known = next((n for n in range(len(prompt), 0, -1) if prompt[:n] in stored), 0)
        if known < len(prompt):
            ends |= {prompt[:known], prompt}
        stored |= {prompt[:n] for n in range(1, len(prompt) + 1)}
    return len(ends - {()})


def cases():
    yield "nothing stored", """
        tree = RadixTree()
        tree.match([1, 2])                              # → []
        tree.match([])                                  # → []
        tree.num_nodes()                                # → 0
    """
    yield "the same prompt twice: the old slots stay", """
        tree = RadixTree()
        tree.insert([1, 2, 3], [10, 11, 12])            # → 0
        tree.insert([1, 2, 3], [20, 21, 22])            # → 3
        tree.match([1, 2, 3])                           # → [10, 11, 12]
        tree.num_nodes()                                # → 1
    """
    yield "a longer prompt adds a child", """
        tree = RadixTree()
        tree.insert([1, 2], [10, 11])                   # → 0
        tree.insert([1, 2, 3, 4], [20, 21, 22, 23])     # → 2
        tree.match([1, 2, 3, 4, 5])                     # → [10, 11, 22, 23]
        tree.num_nodes()                                # → 2
    """
    yield "a shorter prompt adds nothing and splits nothing", """
        tree = RadixTree()
        tree.insert([1, 2, 3, 4], [10, 11, 12, 13])     # → 0
        tree.insert([1, 2], [20, 21])                   # → 2
        tree.num_nodes()                                # → 1
        tree.match([1, 2, 3])                           # → [10, 11, 12]
    """
    yield "prompts that part at the first token", """
        tree = RadixTree()
        tree.insert([1, 2], [10, 11])                   # → 0
        tree.insert([3, 4], [20, 21])                   # → 0
        tree.match([3, 4])                              # → [20, 21]
        tree.match([1, 4])                              # → [10]
        tree.num_nodes()                                # → 2
    """
    yield "an edge is split twice, and its children stay below", """
        tree = RadixTree()
        tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5])         # → 0
        tree.insert([1, 2, 3, 4, 9], [10, 11, 12, 13, 14])          # → 4
        tree.insert([1, 2, 8], [20, 21, 22])            # → 2
        tree.match([1, 2, 3, 4, 5, 6])                  # → [0, 1, 2, 3, 4, 5]
        tree.match([1, 2, 3, 4, 9])                     # → [0, 1, 2, 3, 14]
        tree.match([1, 2, 8, 8])                        # → [0, 1, 22]
        tree.num_nodes()                                # → 5
    """
    yield "a match in the middle of an edge changes nothing", """
        tree = RadixTree()
        tree.insert([1, 2, 3, 4], [10, 11, 12, 13])     # → 0
        tree.match([1, 2, 9])                           # → [10, 11]
        tree.match([1, 2, 3, 4, 5])                     # → [10, 11, 12, 13]
        tree.num_nodes()                                # → 1
    """
    yield "an empty prompt", """
        tree = RadixTree()
        tree.insert([], [])                             # → 0
        tree.num_nodes()                                # → 0
    """
    yield "tokens and slots of different length: refused, nothing stored", """
        tree = RadixTree()
        tree.insert([1, 2], [10])                       # raises ValueError
        tree.match([1, 2])                              # → []
        tree.num_nodes()                                # → 0
    """
    yield "the lists that come in and go out belong to the caller", """
        tree, tokens, slots = RadixTree(), [1, 2, 3], [10, 11, 12]
        tree.insert(tokens, slots)                      # → 0
        tokens.clear()
        slots.clear()
        tree.match([1, 2]).clear()
        tree.match([1, 2, 3])                           # → [10, 11, 12]
    """
    for seed in range(3):
        yield f"300 random prompts, number {seed + 1}", f"""
            walk(RadixTree(), 300, seed={seed})         # → "as expected"
        """
