"""Rows that land where they belong, padding that lands nowhere, and shapes of every kind."""

import torch


def caches(num_blocks, block_size, heads, head_dim):
    """Two caches full of NaN: what was never written must never be read."""
    shape = num_blocks, block_size, heads, head_dim
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


def rows(count, heads, head_dim, seed=0):
    return torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def written(cache):
    """The slots that hold something."""
    return (~cache.flatten(0, 1).isnan()).all(dim=(1, 2)).nonzero().flatten().tolist()


def round_trip(write, gather, heads, head_dim, block_size, table, seq_len):
    """Write a request token by token, gather it, and say how far off it is."""
    k_cache, v_cache = caches(16, block_size, heads, head_dim)
    k, v = rows(seq_len, heads, head_dim, 1), rows(seq_len, heads, head_dim, 2)
    for p in range(seq_len):
        slot = table[p // block_size] * block_size + p % block_size
        write(k_cache, v_cache, [slot], k[p:p + 1], v[p:p + 1])
    got_k, got_v = gather(k_cache, v_cache, table, seq_len)
    assert got_k.shape == k.shape, (
        f"gather gave K of shape {list(got_k.shape)}, expected {list(k.shape)}")
    return torch.equal(got_k, k) and torch.equal(got_v, v)


def cases():
    yield "exactly the slots that were named", """
        k_cache, v_cache = caches(4, 4, 2, 8)
        write(k_cache, v_cache, [13, 0, 7], rows(3, 2, 8), rows(3, 2, 8))
        written(k_cache)                                # → [0, 7, 13]
        written(v_cache)                                # → [0, 7, 13]
    """
    yield "padding: -1 is no row, and above all not the last one", """
        k_cache, v_cache = caches(2, 4, 1, 4)
        write(k_cache, v_cache, [-1, 3, -1], rows(3, 1, 4), rows(3, 1, 4))
        written(k_cache)                                # → [3]
        torch.equal(k_cache[0, 3], rows(3, 1, 4)[1])    # → True
        write(k_cache, v_cache, [-1, -1], rows(2, 1, 4), rows(2, 1, 4))
        written(k_cache)                                # → [3]
    """
    yield "nothing to write", """
        k_cache, v_cache = caches(2, 4, 1, 4)
        write(k_cache, v_cache, [], rows(0, 1, 4), rows(0, 1, 4))
        written(k_cache)                                # → []
    """
    yield "slots as a tensor", """
        k_cache, v_cache = caches(2, 4, 1, 4)
        slots = torch.tensor([5, -1, 1], dtype=torch.int32)
        write(k_cache, v_cache, slots, rows(3, 1, 4), rows(3, 1, 4))
        written(v_cache)                                # → [1, 5]
    """
    yield "a request through its table, block by block", """
        round_trip(write, gather, 2, 8, 4, [7, 1, 3], 9)            # → True
        round_trip(write, gather, 1, 4, 1, [5, 2, 9], 3)            # → True
        round_trip(write, gather, 3, 5, 7, [4, 0], 14)              # → True
    """
    yield "lengths around the end of a block", """
        [round_trip(write, gather, 2, 8, 4, [6, 2, 8], n) for n in (1, 3, 4, 5, 8, 12)]     # → [
                                                        #    True, True, True, True, True, True]
    """
    yield "an empty context", """
        k_cache, v_cache = caches(2, 4, 2, 8)
        list(gather(k_cache, v_cache, [1], 0)[0].shape)             # → [0, 2, 8]
        list(gather(k_cache, v_cache, [], 0)[1].shape)              # → [0, 2, 8]
    """
    yield "K and V as slices of one fused projection, which are not contiguous", """
        k_cache, v_cache = caches(2, 4, 2, 8)
        qkv = rows(3, 8, 8)
        write(k_cache, v_cache, [2, 4, 5], qkv[:, 4:6], qkv[:, 6:8])
        k, v = gather(k_cache, v_cache, [0, 1], 6)
        torch.equal(k[2], qkv[0, 4:6])                  # → True
        torch.equal(v[4], qkv[1, 6:8])                  # → True
    """
    yield "a cache that is a view of all layers", """
        pool = torch.full((2, 3, 2, 4, 1, 4), torch.nan)
        write(pool[0, 1], pool[1, 1], [6], rows(1, 1, 4), rows(1, 1, 4))
        written(pool[0, 1])                             # → [6]
        (written(pool[0, 0]), written(pool[0, 2]))      # → ([], [])
    """
    yield "what was gathered stays, whatever is written later", """
        k_cache, v_cache = caches(1, 4, 1, 4)
        write(k_cache, v_cache, [0, 1], rows(2, 1, 4), rows(2, 1, 4))
        k, v = gather(k_cache, v_cache, [0], 2)
        write(k_cache, v_cache, [0, 1], rows(2, 1, 4, 5), rows(2, 1, 4, 5))
        torch.equal(k, rows(2, 1, 4))                   # → True
    """
    yield "a slot beyond the last row, beside a good one: refused, nothing written", """
        k_cache, v_cache = caches(2, 4, 1, 4)
        write(k_cache, v_cache, [3, 8], rows(2, 1, 4), rows(2, 1, 4))       # raises ValueError
        write(k_cache, v_cache, [3, -2], rows(2, 1, 4), rows(2, 1, 4))      # raises ValueError
        (written(k_cache), written(v_cache))            # → ([], [])
    """
    yield "a table too short for the context", """
        k_cache, v_cache = caches(4, 4, 1, 4)
        gather(k_cache, v_cache, [0, 1], 9)             # raises ValueError
        gather(k_cache, v_cache, [], 1)                 # raises ValueError
    """
