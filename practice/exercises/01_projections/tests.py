"""The figures of the chapter, growth, and counts of zero."""


def cases():
    yield "the figures of the chapter", """
        projections_without_cache(100, 50)                      # → 18675
        projections_with_cache(100, 50)                         # → 450
    """
    yield "what is saved there, in percent", """
        without, cached = projections_without_cache(100, 50), projections_with_cache(100, 50)
        100 * (1 - cached / without)                            # ≈ 97.6
    """
    yield "one step over one token", """
        projections_without_cache(1, 1)                         # → 3
        projections_with_cache(1, 1)                            # → 6
    """
    yield "no steps: nothing is generated, but the context has been projected for the cache", """
        projections_without_cache(5, 0)                         # → 0
        projections_with_cache(5, 0)                            # → 15
    """
    yield "an empty context: step 0 looks at nothing", """
        projections_without_cache(0, 1)                         # → 0
        projections_without_cache(0, 3)                         # → 9
        projections_with_cache(0, 3)                            # → 9
    """
    yield "twice the steps: one count doubles, the other grows with the square", """
        projections_without_cache(0, 2001)                      # → 6003000
        projections_without_cache(0, 4001)                      # → 24006000
        projections_with_cache(0, 4001)                         # → 12003
    """
    yield "negative numbers, in either place and either function", """
        projections_without_cache(3, -1)                        # raises ValueError
        projections_with_cache(-1, 3)                           # raises ValueError
    """
