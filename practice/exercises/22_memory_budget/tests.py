"""The card of the chapter, and what each of the five numbers does to the result."""

GiB = 2**30


def cases():
    yield "a block of Qwen3-0.6B: 28 layers, 256 tokens, 8 KV heads, head_dim 128, bf16", """
        block_bytes(28, 256, 8, 128, 2)                             # → 29360128
        block_bytes(28, 256, 8, 128, 2) / 2**20                     # → 28.0
    """
    yield "all 3,053 blocks of the chapter's cache", """
        3053 * block_bytes(28, 256, 8, 128, 2)                      # → 89636470784
    """
    yield "the chapter's card, in rounded GiB", """
        num_blocks(95.085 * GiB, 0.9, 1.66 * GiB, 1.599 * GiB, 1.16 * GiB, 29360128)      # → 3052
    """
    yield "what is used now, by this process or another, is gone", """
        num_blocks(10000, 1.0, 0, 0, 0, 100)                        # → 100
        num_blocks(10000, 1.0, 2500, 0, 0, 100)                     # → 75
    """
    yield "what a pass needs is the peak above what is there now", """
        num_blocks(10000, 1.0, 0, 800, 300, 100)                    # → 95
        num_blocks(10000, 1.0, 0, 800, 800, 100)                    # → 100
    """
    yield "utilization is a share of the whole card, not of what is free", """
        num_blocks(10000, 0.5, 2000, 0, 0, 100)                     # → 30
    """
    yield "whole blocks only, and an int", """
        num_blocks(1000, 1.0, 0, 0, 0, 300)                         # → 3
        num_blocks(1199.0, 1.0, 0, 0, 0, 300)                       # → 3
        num_blocks(1200.0, 1.0, 0, 0, 0, 300)                       # → 4
    """
    yield "exactly one block, and not quite one", """
        num_blocks(1000, 1.0, 700, 0, 0, 300)                       # → 1
        num_blocks(1000, 1.0, 701, 0, 0, 300)                       # raises ValueError
    """
    yield "less than nothing is left", """
        num_blocks(1000, 0.5, 900, 0, 0, 300)                       # raises ValueError
    """
