"""Two models of the book, whole blocks, and budgets that just fit."""

GiB = 2**30


def cases():
    yield "Qwen3-0.6B in bf16: 28 layers, 8 KV heads (and 16 query heads), head_dim 128", """
        kv_bytes_per_token(28, 8, 128, 2)                           # → 114688
        kv_bytes_per_token(1, 8, 128, 2)                            # → 4096
    """
    yield "its bill for 1, 8, 32 and 128 requests of 4,096 tokens, in GB", """
        token = kv_bytes_per_token(28, 8, 128, 2)
        [n * 4096 * token / 1e9 for n in (1, 8, 32, 128)]           # ≈ [0.47, 3.76, 15.03, 60.13]
    """
    yield "Qwen2.5-7B: 80 GiB less 15 for weights and 10 for the rest", """
        token = kv_bytes_per_token(28, 4, 128, 2)
        token                                                       # → 57344
        concurrent_requests(55 * GiB, token, 3000, 16)              # → 342
        concurrent_requests(55 * GiB, token, 32768, 16)             # → 31
    """
    yield "in float32 a token takes twice the bytes", """
        kv_bytes_per_token(30, 3, 64, 4)                            # → 46080
        kv_bytes_per_token(30, 3, 64, 2)                            # → 23040
    """
    yield "a context that fills its blocks exactly", """
        concurrent_requests(1600, 100, 8, 4)                        # → 2
        concurrent_requests(1600, 100, 9, 4)                        # → 1
        concurrent_requests(1600, 100, 7, 4)                        # → 2
    """
    yield "a budget that is too small for one", """
        concurrent_requests(799, 100, 5, 4)                         # → 0
        concurrent_requests(0, 100, 5, 4)                           # → 0
    """
    yield "a count is an integer, however large the budget", """
        concurrent_requests(10**18, 1, 3, 1)                        # → 333333333333333333
    """
    yield "no tokens, or a negative block size", """
        concurrent_requests(2400, 100, -3, 4)                       # raises ValueError
        concurrent_requests(2400, 100, 5, -4)                       # raises ValueError
    """
