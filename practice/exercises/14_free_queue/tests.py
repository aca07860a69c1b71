"""Order, membership, the order of release, and how many blocks are looked at to take one from the
middle."""

import random
import time


class Block(int):
    """A block number that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other):
        Block.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def comparisons(FreeQueue, count):
    """Comparisons made while 200 blocks are taken from the middle of a queue of `count` and put
    back."""
    queue = FreeQueue([Block(block) for block in range(count)])
    Block.compared = 0
    for block in range(count // 2, count // 2 + 200):
        queue.remove(Block(block))
        queue.append(Block(block))
    return Block.compared


def quickest(queue, batches=4, size=500):
    """Seconds of the quickest of these batches of pops: what else the machine does slows some, and
    not all."""
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(size):
            queue.pop()
        times.append(time.perf_counter() - start)
    return min(times)


def emptied(queue):
    """Take every block out of a queue at its head. Raises AssertionError when the pops after 30,000
    others take ten times as long as the first ones: they look at those taken before."""
    first = quickest(queue)
    for _ in range(30_000):
        queue.pop()
    times = quickest(queue) / max(first, 1e-6)
    if times > 10:
        raise AssertionError(f"after 30,000 pops, a pop takes {times:.0f} times as long as at the "
                             "beginning: the head takes longer and longer to find")
    while len(queue):
        queue.pop()
    return "empty"


def walk(queue, num_blocks, steps, seed):
    """Random calls against a plain list. Raises AssertionError."""
    rng = random.Random(seed)
    expected, out = list(range(num_blocks)), []
    for step in range(steps):
        way = rng.choice(["pop", "append", "remove"])
        if way == "pop" and expected:
            block = expected.pop(0)
            got = queue.pop()
            assert got == block, f"step {step}: pop() gave {got}, expected {block}"
            out.append(block)
        elif way == "append" and out:
            block = out.pop(rng.randrange(len(out)))
            expected.append(block)
            queue.append(block)
        elif way == "remove" and expected:
            block = expected.pop(rng.randrange(len(expected)))
            queue.remove(block)
            out.append(block)
        assert list(
            queue
        ) == expected, f"step {step}, {way}: the queue is {list(queue)}, expected {expected}"
        assert len(queue) == len(
            expected), f"step {step}, {way}: len() is {len(queue)}, not {len(expected)}"
    return "as expected"


def cases():
    yield "in at the tail, out at the head", """
        queue = FreeQueue(range(3))
        queue.pop()                         # → 0
        queue.append(0)
        [queue.pop() for _ in range(3)]     # → [1, 2, 0]
        len(queue)                          # → 0
        list(queue)                         # → []
    """
    yield "out of the head, the middle and the tail", """
        queue = FreeQueue([5, 3, 8, 1])
        queue.remove(5)
        queue.remove(1)
        list(queue)                         # → [3, 8]
        queue.remove(8)
        queue.remove(3)
        list(queue)                         # → []
        queue.append(7)
        queue.pop()                         # → 7
    """
    yield "a block comes back at the tail, not where it was", """
        queue = FreeQueue([0, 1, 2])
        queue.remove(1)
        queue.append(1)
        list(queue)                         # → [0, 2, 1]
    """
    yield "calls that make no sense change nothing", """
        queue = FreeQueue([4, 2])
        queue.remove(3)                     # raises ValueError
        queue.append(2)                     # raises ValueError
        list(queue)                         # → [4, 2]
        FreeQueue([]).pop()                 # raises IndexError
    """
    yield "the two prompts of the chapter, tables [0, 1] and [0, 2], released in turn", """
        queue, ref_cnt = FreeQueue(range(3, 2234)), [2, 1, 1] + [0] * 2231
        release([0, 1], ref_cnt, queue)     # → [1]
        len(queue)                          # → 2232
        release([0, 2], ref_cnt, queue)     # → [2, 0]
        len(queue)                          # → 2234
        list(queue)[-3:]                    # → [1, 2, 0]
    """
    yield "a table of its own joins in reverse, and stays as it was", """
        queue, ref_cnt, table = FreeQueue([]), [1, 1, 1, 1], [2, 0, 3]
        release(table, ref_cnt, queue)      # → [3, 0, 2]
        list(queue)                         # → [3, 0, 2]
        ref_cnt                             # → [0, 1, 0, 0]
        table                               # → [2, 0, 3]
    """
    yield "nothing held, nothing released", """
        queue, ref_cnt = FreeQueue([1]), [1, 0]
        release([], ref_cnt, queue)         # → []
        list(queue)                         # → [1]
    """
    for seed in range(3):
        yield f"a random walk of 300 steps, number {seed + 1}", f"""
            walk(FreeQueue(range(8)), 8, 300, seed={seed})      # → "as expected"
        """
    yield "taking one of 2,000 from the middle does not look at the others", """
        comparisons(FreeQueue, 2000) <= 2000        # → True
    """
    yield "taking the head does not step over those taken before", """
        emptied(FreeQueue(range(36_000)))           # → "empty"
    """
