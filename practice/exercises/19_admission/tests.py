"""Requests at the limits, and the three things that can run out."""


def cases():
    yield "an empty prompt, and nothing to generate", """
        check_request(0, 4, 64, 8, 4)               # raises ValueError
        check_request(8, 0, 64, 8, 4)               # raises ValueError
        check_request(8, -1, 64, 8, 4)              # raises ValueError
        check_request(1, 1, 64, 8, 4)               # → 1
    """
    yield "the longest request that max_model_len allows", """
        check_request(60, 5, 64, 16, 4)             # → 16
        check_request(60, 6, 64, 17, 4)             # raises ValueError
        check_request(64, 1, 64, 16, 4)             # → 16
        check_request(65, 1, 64, 17, 4)             # raises ValueError
    """
    yield "2 blocks of 4, a prompt of 8: one token may be generated, two may not", """
        check_request(8, 1, 100, 2, 4)              # → 2
        check_request(8, 2, 100, 2, 4)              # raises ValueError
        check_request(5, 4, 100, 2, 4)              # → 2
    """
    yield "the whole pool for one request", """
        check_request(100, 29, 1000, 8, 16)         # → 8
        check_request(100, 30, 1000, 8, 16)         # raises ValueError
    """
    yield "nobody waits", """
        admit([], 10, 8, 8, 4)                      # → []
    """
    yield "everything fits", """
        admit([("a", 3), ("b", 4), ("c", 5)], 4, 3, 12, 4)      # → [("a", 3), ("b", 4), ("c", 5)]
    """
    yield "seats run out", """
        admit([("a", 1), ("b", 1), ("c", 1)], 10, 2, 8, 4)      # → [("a", 1), ("b", 1)]
        admit([("a", 1)], 10, 0, 8, 4)              # → []
    """
    yield "the budget runs out in the middle of a prompt, and exactly at its end", """
        admit([("a", 6), ("b", 6)], 10, 8, 7, 4)    # → [("a", 6), ("b", 1)]
        admit([("a", 6), ("b", 6)], 10, 8, 6, 4)    # → [("a", 6)]
        admit([("a", 6)], 10, 8, 1, 4)              # → [("a", 1)]
        admit([("a", 6)], 10, 8, 0, 4)              # → []
    """
    yield "all blocks of a prompt must be free, though its first chunk needs fewer", """
        admit([("a", 100)], 25, 8, 8, 4)            # → [("a", 8)]
        admit([("a", 100)], 24, 8, 8, 4)            # → []
        admit([("a", 4), ("b", 100)], 25, 8, 8, 4)  # → [("a", 4)]
        admit([("a", 4), ("b", 100)], 26, 8, 8, 4)  # → [("a", 4), ("b", 4)]
    """
    yield "blocks run out, and nobody overtakes", """
        admit([("a", 4), ("b", 8), ("c", 4)], 2, 8, 100, 4)     # → [("a", 4)]
        admit([("a", 12), ("b", 1)], 2, 8, 100, 4)  # → []
    """
    yield "a prompt that ends exactly with a block needs no block more", """
        admit([("a", 8)], 2, 1, 8, 4)               # → [("a", 8)]
        admit([("a", 9)], 2, 1, 9, 4)               # → []
    """
    yield "the list of those who wait is left as it was", """
        waiting = [("a", 2), ("b", 2)]
        admit(waiting, 1, 8, 8, 4)                  # → [("a", 2)]
        waiting                                     # → [("a", 2), ("b", 2)]
    """
