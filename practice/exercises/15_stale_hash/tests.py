"""The trace of the chapter, blocks that hold the same, and a random walk against the truth."""

import random


def walk(cache, steps, seed):
    """Random calls, held against what each block really holds. Raises AssertionError."""
    rng = random.Random(seed)
    holds, hashes = {}, {}  # block -> (prefix, tokens); prefix -> hash

    def prefix(length):
        return tuple((rng.randrange(2), rng.randrange(2)) for _ in range(length))

    def hash_of(blocks):
        return hashes.get(blocks) if blocks else None

    for step in range(steps):
        path = prefix(rng.choice([0, 0, 1, 1, 2]))
        if path and path not in hashes:
            path = ()
        tokens = (rng.randrange(2), rng.randrange(2))
        block = rng.randrange(6)
        if rng.random() < 0.5:
            hashes[path + (tokens,)] = cache.register(block, hash_of(path), list(tokens))
            holds[block] = (path, tokens)
        elif rng.random() < 0.5:
            cache.forget(block)
            holds.pop(block, None)
        right = [b for b, held in sorted(holds.items()) if held == (path, tokens)]
        got = cache.find(hash_of(path), list(tokens))
        assert got in right or not right and got is None, (
            f"step {step}: find gave {got}; {list(tokens)} after {list(path)} is in "
            f"{right or 'no block'}")
    return "as expected"


def cases():
    yield "nothing registered, nothing found", """
        cache = PrefixCache()
        cache.find(None, [1, 2])                # → None
        cache.forget(3)
        cache.find(None, [1, 2])                # → None
    """
    yield "the trace of the chapter, with block 1 registered anew before it is forgotten", """
        cache = PrefixCache()
        first = cache.register(0, None, [1, 2])
        second = cache.register(1, first, [3, 4])
        other = cache.register(1, None, [3, 4])
        cache.find(first, [3, 4])               # → None
        cache.find(None, [3, 4])                # → 1
    """
    yield "the hash says what it said before", """
        cache = PrefixCache()
        cache.register(0, None, [1, 2]) == chained_hash(None, [1, 2])       # → True
        cache.register(5, 77, [1, 2]) == chained_hash(77, [1, 2])           # → True
    """
    yield "the same tokens, other tokens, under another prefix", """
        cache = PrefixCache()
        first = cache.register(0, None, [1, 2])
        cache.find(first, [1, 2])               # → None
        cache.find(None, [2, 1])                # → None
        cache.find(None, [1, 2])                # → 0
    """
    yield "two blocks hold the same: forgetting the newer one leaves the older", """
        cache = PrefixCache()
        one = cache.register(0, None, [1, 2])
        two = cache.register(1, None, [1, 2])
        cache.forget(1)
        cache.find(None, [1, 2])                # → 0
        cache.forget(0)
        cache.find(None, [1, 2])                # → None
    """
    yield "two blocks hold the same: forgetting the older one leaves the newer", """
        cache = PrefixCache()
        one = cache.register(0, None, [1, 2])
        two = cache.register(1, None, [1, 2])
        cache.forget(0)
        cache.find(None, [1, 2])                # → 1
    """
    yield "one of two is registered for something else", """
        cache = PrefixCache()
        one = cache.register(0, None, [1, 2])
        two = cache.register(1, None, [1, 2])
        other = cache.register(1, None, [5, 6])
        cache.find(None, [1, 2])                # → 0
        cache.find(None, [5, 6])                # → 1
    """
    yield "registering a block again for the same thing", """
        cache = PrefixCache()
        one = cache.register(0, None, [1, 2])
        two = cache.register(0, None, [1, 2])
        cache.find(None, [1, 2])                # → 0
        cache.forget(0)
        cache.find(None, [1, 2])                # → None
    """
    yield "a block that comes back to what it held", """
        cache = PrefixCache()
        one = cache.register(0, None, [1, 2])
        other = cache.register(0, None, [5, 6])
        again = cache.register(0, None, [1, 2])
        cache.find(None, [1, 2])                # → 0
        cache.find(None, [5, 6])                # → None
    """
    for seed in range(3):
        yield f"a random walk of 400 steps, number {seed + 1}", f"""
            walk(PrefixCache(), 400, seed={seed})       # → "as expected"
        """
