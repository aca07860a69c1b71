"""Which hole is taken, when holes become one, and a random walk against a strip of letters."""

import random


def walk(strip, size, steps, seed):
    """Random calls, held against a plain list of who holds which row. Raises AssertionError."""
    rng = random.Random(seed)
    rows, pieces = [None] * size, {}
    for step in range(steps):
        if pieces and rng.random() < 0.5:
            start = rng.choice(sorted(pieces))
            for row in range(start, start + pieces.pop(start)):
                rows[row] = None
            strip.free(start)
            call = f"free({start})"
        else:
            length = rng.randint(1, size // 3)
            expected = next(
                (at for at in range(size - length + 1) if all(row is None
                                                              for row in rows[at:at + length])),
                None)
            got = strip.allocate(length)
            call = f"allocate({length})"
            assert got == expected, f"step {step}: {call} gave {got}, expected {expected}"
            if expected is not None:
                rows[expected:expected + length] = [expected] * length
                pieces[expected] = length
        free = rows.count(None)
        got = strip.num_free()
        assert got == free, f"step {step}: after {call}, num_free() is {got}, not {free}"
        text = "".join("." if row is None else "x" for row in rows)
        longest = max(map(len, text.split("x")))
        assert strip.largest_hole() == longest, (
            f"step {step}: after {call}, largest_hole() is {strip.largest_hole()}, not {longest}")
    return "as expected"


def cases():
    yield "a new strip is one hole", """
        strip = FirstFit(5)
        strip.num_free()                # → 5
        strip.largest_hole()            # → 5
        strip.allocate(5)               # → 0
        strip.num_free()                # → 0
        strip.largest_hole()            # → 0
        strip.allocate(1)               # → None
    """
    yield "the first hole, not the one that fits best", """
        strip = FirstFit(12)
        [strip.allocate(n) for n in (4, 1, 2, 1, 4)]    # → [0, 4, 5, 7, 8]
        strip.free(0)
        strip.free(5)
        strip.allocate(2)               # → 0
        strip.allocate(2)               # → 2
        strip.allocate(2)               # → 5
    """
    yield "a hole between two others joins both", """
        strip = FirstFit(9)
        [strip.allocate(3) for _ in range(3)]           # → [0, 3, 6]
        strip.free(0)
        strip.free(6)
        strip.largest_hole()            # → 3
        strip.free(3)
        strip.largest_hole()            # → 9
    """
    yield "holes join in whatever order they come up", """
        strip = FirstFit(4)
        [strip.allocate(2) for _ in range(2)]           # → [0, 2]
        strip.free(2)
        strip.free(0)
        strip.allocate(4)               # → 0
    """
    yield "an allocation that fails changes nothing", """
        strip = FirstFit(6)
        strip.allocate(4)               # → 0
        strip.allocate(3)               # → None
        strip.num_free()                # → 2
        strip.allocate(2)               # → 4
    """
    yield "freeing what is not the start of a piece is an error and changes nothing", """
        strip = FirstFit(6)
        strip.allocate(4)               # → 0
        strip.free(1)                   # raises ValueError
        strip.free(4)                   # raises ValueError
        strip.num_free()                # → 2
        strip.free(0)
        strip.free(0)                   # raises ValueError
        strip.num_free()                # → 6
        strip.largest_hole()            # → 6
    """
    yield "a length below 1", """
        strip = FirstFit(6)
        strip.allocate(0)               # raises ValueError
        strip.allocate(-2)              # raises ValueError
        strip.num_free()                # → 6
    """
    for seed in range(3):
        yield f"a random walk of 300 steps, number {seed + 1}", f"""
            walk(FirstFit(24), 24, 300, seed={seed})    # → "as expected"
        """
