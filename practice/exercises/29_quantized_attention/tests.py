"""The same as attention over dequantized rows, whatever the table, the group and the scales."""

import torch


def data(length, num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, seed=0):
    """Arguments of decode but for its scale: blocks dealt in random order, NaN where nothing was
    written."""
    g = torch.Generator().manual_seed(seed)
    blocks = -(-length // block_size)
    table = torch.randperm(blocks + 2, generator=g)[:blocks].tolist()
    shape = (blocks + 2, block_size, num_kv_heads)
    k, v = torch.full((2, *shape, head_dim), torch.nan)
    k_scales, v_scales = torch.full((2, *shape), torch.nan)
    for t in range(length):
        at = table[t // block_size], t % block_size
        k[at], v[at] = 2 * torch.randn(2, num_kv_heads, head_dim, generator=g)
        k_scales[at], v_scales[at] = 0.1 + torch.rand(2, num_kv_heads, generator=g)
    q = torch.randn(num_heads, head_dim, generator=g)
    fp8 = torch.float8_e4m3fn
    return q, k.to(fp8), v.to(fp8), k_scales, v_scales, table, length


def reference(q, k, v, k_scales, v_scales, table, length, scale):
    """Every row dequantized first, one head after the other."""
    out = torch.zeros_like(q)
    group = len(q) // k.shape[2]
    places = [(table[t // k.shape[1]], t % k.shape[1]) for t in range(length)]
    for head in range(len(q) if length else 0):
        own = head // group
        keys = torch.stack([k.float()[at][own] * k_scales[at][own] for at in places])
        values = torch.stack([v.float()[at][own] * v_scales[at][own] for at in places])
        out[head] = (keys @ q[head] * scale).softmax(0) @ values
    return out


def cases():
    yield "full blocks", """
        given = data(8)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
    """
    yield "a last block that is not full, and NaN behind it", """
        given = data(7)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
        given = data(1)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
    """
    yield "groups of one, of three, and one KV head for all", """
        given = data(9, num_heads=2)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
        given = data(9, num_heads=6)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
        given = data(9, num_heads=4, num_kv_heads=1)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
    """
    yield "blocks of one token, and of more than the context", """
        given = data(5, block_size=1)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
        given = data(5, block_size=16)
        decode(*given, 0.5)                                         # → reference(*given, 0.5)
    """
    yield "no context", """
        decode(*data(0), 0.5)                                       # → torch.zeros(4, 8)
    """
    yield "nothing that was given is changed", """
        given = data(6)
        before = [x.clone() for x in given[3:5]]
        decode(*given, 0.5).shape == given[0].shape                 # → True
        all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given[3:5], before))
                                                                    # → True
    """
