"""The bytes that are hashed, what chains, and what is not full."""


def cases():
    yield "the first of two blocks is shared, whatever comes after it", """
        one = block_hashes([1, 2, 3, 4, 5, 6], 2)
        other = block_hashes([1, 2, 3, 4, 9, 9], 2)
        [a == b for a, b in zip(one, other)]            # → [True, True, False]
    """
    yield "one difference at the start changes every hash", """
        one = block_hashes([1, 2, 3, 4, 5, 6], 2)
        other = block_hashes([0, 2, 3, 4, 5, 6], 2)
        [a == b for a, b in zip(one, other)]            # → [False, False, False]
    """
    yield "the same tokens at another place", """
        hashes = block_hashes([5, 5, 5, 5, 5, 5], 2)
        len(set(hashes))                                # → 3
    """
    yield "order counts inside a block", """
        chained_hash(None, [1, 2]) == chained_hash(None, [2, 1])        # → False
    """
    yield "1, 23 is not 12, 3", """
        chained_hash(None, [1, 23]) == chained_hash(None, [12, 3])      # → False
    """
    yield "large token ids: 256 is not 0", """
        chained_hash(None, [256]) == chained_hash(None, [0])            # → False
        chained_hash(None, [151935])                    # → 9959470851893015825
    """
    yield "no parent is not a parent of 0", """
        chained_hash(None, [0])                         # → 8794265229978523055
        chained_hash(0, [0])                            # → 15392584411371816759
    """
    yield "the largest parent there can be", """
        chained_hash(2**64 - 1, [1])                    # → 11931577584162491337
    """
    yield "only full blocks", """
        len(block_hashes(list(range(255)), 256))        # → 0
        len(block_hashes(list(range(256)), 256))        # → 1
        len(block_hashes(list(range(257)), 256))        # → 1
        len(block_hashes(list(range(512)), 256))        # → 2
        block_hashes([], 4)                             # → []
    """
    yield "the last, half full block changes nothing", """
        block_hashes([1, 2, 3], 2) == block_hashes([1, 2, 9], 2)        # → True
    """
    yield "block size 1: a chain of single tokens", """
        block_hashes([7, 7], 1)                      # → [6424735547165501610, 14668551877809848882]
    """
    yield "tuples are prompts too, and nothing is changed", """
        tokens = [1, 2, 3, 4]
        block_hashes(tuple(tokens), 2) == block_hashes(tokens, 2)       # → True
        tokens                                          # → [1, 2, 3, 4]
    """
    yield "a negative block size", """
        block_hashes([1, 2, 3], -1)                     # raises ValueError
    """
