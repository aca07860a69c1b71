"""The token that crosses the line, ties, sums that rounding leaves short, and the original
order."""


def kept(probs):
    """Which tokens are left, and whether the probabilities add up to 1."""
    return [index for index, p in enumerate(probs) if p], abs(sum(probs) - 1) < 1e-9


def cases():
    yield "exactly on the line: .4 + .3 reaches 0.7, nothing more is needed", """
        kept(top_p_filter([0.1, 0.2, 0.3, 0.4], 0.7))           # → ([2, 3], True)
        kept(top_p_filter([0.25, 0.25, 0.5], 0.5))              # → ([2], True)
        kept(top_p_filter([0.25, 0.25, 0.5], 0.75))             # → ([0, 2], True)
    """
    yield "just over the line takes one more", """
        kept(top_p_filter([0.25, 0.25, 0.5], 0.51))             # → ([0, 2], True)
        kept(top_p_filter([0.25, 0.25, 0.5], 0.76))             # → ([0, 1, 2], True)
    """
    yield "a tiny top_p keeps the most likely token", """
        kept(top_p_filter([0.3, 0.4, 0.3], 1e-9))               # → ([1], True)
    """
    yield "a certain token", """
        top_p_filter([0.0, 1.0, 0.0], 0.9)                      # → [0.0, 1.0, 0.0]
        top_p_filter([1.0], 0.1)                                # → [1.0]
    """
    yield "ties: the earlier token is kept first", """
        kept(top_p_filter([0.25, 0.25, 0.25, 0.25], 0.5))       # → ([0, 1], True)
        kept(top_p_filter([0.2, 0.4, 0.4], 0.4))                # → ([1], True)
    """
    yield "the original order stays", """
        top_p_filter([0.5, 0.125, 0.375], 0.8)                  # ≈ [0.571, 0.000, 0.429]
    """
    yield "top_p of 1 keeps all that can occur, and nothing that cannot", """
        kept(top_p_filter([0.5, 0.0, 0.25, 0.25], 1.0))         # → ([0, 2, 3], True)
    """
    yield "ten times 0.1 is a little less than 1", """
        kept(top_p_filter([0.1] * 10, 1.0))               # → ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], True)
    """
    yield "one value for each token", """
        len(top_p_filter([0.1, 0.2, 0.3, 0.4], 0.5))            # → 4
    """
    yield "top_p out of bounds", """
        top_p_filter([0.5, 0.5], -0.1)                          # raises ValueError
        top_p_filter([0.5, 0.5], 1.1)                           # raises ValueError
    """
    yield "the probabilities are left as they were", """
        probs = [0.1, 0.2, 0.3, 0.4]
        kept(top_p_filter(probs, 0.5))                          # → ([2, 3], True)
        probs                                                   # → [0.1, 0.2, 0.3, 0.4]
    """
