"""Order of the queue, reference counts, and calls that fail without a trace."""

import random


def walk(pool, num_blocks, steps, seed):
    """Random allocations and frees, held against a plain list as the queue. Raises
    AssertionError."""
    rng = random.Random(seed)
    queue, held = list(range(num_blocks)), []
    for step in range(steps):
        if held and rng.random() < 0.5:
            rng.shuffle(held)
            count = rng.randint(1, len(held))
            blocks, held = held[:count], held[count:]
            pool.free(list(blocks))
            queue += blocks
            call = f"free({blocks})"
        else:
            count = rng.randint(0, num_blocks // 2)
            expected = queue[:count] if count <= len(queue) else None
            got = pool.allocate(count)
            assert got == expected, (
                f"step {step}: allocate({count}) gave {got}, expected {expected}")
            if expected:
                queue, held = queue[count:], held + expected
            call = f"allocate({count})"
        free = pool.num_free()
        assert free == len(
            queue), f"step {step}: after {call}, {free} blocks are free, expected {len(queue)}"
        counts = [int(block in held) for block in range(num_blocks)]
        assert pool.ref_cnt == counts, (
            f"step {step}: after {call}, ref_cnt is {pool.ref_cnt}, not {counts}")
    return "as expected"


def cases():
    yield "a new pool is all free", """
        pool = BlockPool(3)
        pool.num_free()             # → 3
        pool.ref_cnt                # → [0, 0, 0]
    """
    yield "nothing asked, nothing given", """
        pool = BlockPool(2)
        pool.allocate(0)            # → []
        pool.num_free()             # → 2
        pool.free([])
        pool.num_free()             # → 2
    """
    yield "the whole pool, then no more, then all of it again", """
        pool = BlockPool(3)
        pool.allocate(3)            # → [0, 1, 2]
        pool.allocate(0)            # → []
        pool.allocate(1)            # → None
        pool.free([1, 2, 0])
        pool.allocate(3)            # → [1, 2, 0]
    """
    yield "freed blocks queue up in the order given", """
        pool = BlockPool(4)
        pool.allocate(4)            # → [0, 1, 2, 3]
        pool.free([3, 1])
        pool.free([0])
        pool.allocate(3)            # → [3, 1, 0]
    """
    yield "an allocation that fails leaves the queue as it was", """
        pool = BlockPool(4)
        pool.allocate(2)            # → [0, 1]
        pool.allocate(3)            # → None
        pool.num_free()             # → 2
        pool.ref_cnt                # → [1, 1, 0, 0]
        pool.allocate(2)            # → [2, 3]
    """
    yield "a block with two holders is free after the second lets go", """
        pool = BlockPool(3)
        pool.allocate(2)            # → [0, 1]
        pool.ref_cnt[0] += 1
        pool.free([0, 1])
        pool.ref_cnt                # → [1, 0, 0]
        pool.num_free()             # → 2
        pool.free([0])
        pool.allocate(3)            # → [2, 1, 0]
    """
    yield "two references of one holder, given up in one call", """
        pool = BlockPool(2)
        pool.allocate(1)            # → [0]
        pool.ref_cnt[0] += 1
        pool.free([0, 0])
        pool.num_free()             # → 2
    """
    yield "freeing a free block is an error and changes nothing", """
        pool = BlockPool(4)
        pool.allocate(2)            # → [0, 1]
        pool.free([1, 2])           # raises ValueError
        pool.ref_cnt                # → [1, 1, 0, 0]
        pool.num_free()             # → 2
        pool.allocate(2)            # → [2, 3]
    """
    yield "freeing a block twice in one call is an error and changes nothing", """
        pool = BlockPool(4)
        pool.allocate(2)            # → [0, 1]
        pool.free([0, 1, 0])        # raises ValueError
        pool.ref_cnt                # → [1, 1, 0, 0]
        pool.num_free()             # → 2
    """
    yield "blocks that are not in the pool: past the end, and -1", """
        pool = BlockPool(2)
        pool.allocate(2)            # → [0, 1]
        pool.free([0, 2])           # raises ValueError
        pool.free([-1])             # raises ValueError
        pool.ref_cnt                # → [1, 1]
        pool.num_free()             # → 0
    """
    yield "the list that was handed out is the caller's", """
        pool = BlockPool(4)
        blocks = pool.allocate(2)
        blocks.clear()
        pool.ref_cnt                # → [1, 1, 0, 0]
        pool.allocate(2)            # → [2, 3]
    """
    yield "a pool needs a block", """
        BlockPool(0)                # raises ValueError
        BlockPool(-1)               # raises ValueError
    """
    yield "two pools share nothing", """
        one, other = BlockPool(2), BlockPool(2)
        one.allocate(2)             # → [0, 1]
        other.num_free()            # → 2
        other.allocate(1)           # → [0]
    """
    for seed in range(3):
        yield f"a random walk of 200 steps, number {seed + 1}", f"""
            walk(BlockPool(9), 9, 200, seed={seed})     # → "as expected"
        """
