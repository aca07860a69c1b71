"""Decode, prefill and chunks against contiguous SDPA, over caches whose unused rows hold NaN."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def off(paged_attention, contexts, new, heads=(8, 2), head_dim=64, block_size=4, seed=0):
    """The largest distance from SDPA over the same K/V laid out contiguously; rounded to 4
    digits."""
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    tables, block = [[] for _ in contexts], 0
    while any(len(t) * block_size < n for t, n in zip(tables, contexts)):  # dealt out in turn
        for table, context in zip(tables, contexts):
            if len(table) * block_size < context:
                table.append(block)
                block += 1
    k_cache = torch.full((block + 3, block_size, num_kv_heads, head_dim), torch.nan)
    v_cache = k_cache.clone()
    q = torch.randn(sum(new), num_heads, head_dim, generator=g)
    starts, expected = [0], torch.zeros_like(q)
    for table, context, count in zip(tables, contexts, new):
        k = torch.randn(context, num_kv_heads, head_dim, generator=g)
        v = torch.randn(context, num_kv_heads, head_dim, generator=g)
        for p in range(context):
            k_cache[table[p // block_size], p % block_size] = k[p]
            v_cache[table[p // block_size], p % block_size] = v[p]
        start, end = starts[-1], starts[-1] + count
        mask = torch.arange(context) <= context - count + torch.arange(count)[:, None]
        if count:
            expected[start:end] = scaled_dot_product_attention(q[start:end].transpose(0, 1),
                                                               k.transpose(0, 1), v.transpose(0, 1),
                                                               attn_mask=mask, scale=head_dim**-0.5,
                                                               enable_gqa=True).transpose(0, 1)
        starts.append(end)
    before = q.clone(), k_cache.clone(), v_cache.clone()
    out = paged_attention(q, k_cache, v_cache, tables, list(contexts), starts, head_dim**-0.5)
    for name, tensor, copy in zip(("q", "the K cache", "the V cache"), (q, k_cache, v_cache),
                                  before):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), f"{name} was changed"
    assert out.shape == q.shape, (
        f"the result has the shape {list(out.shape)}, expected {list(q.shape)}")
    assert not out.isnan().any(
    ), "the result holds NaN: a row was read that no token of the request owns"
    return round((out - expected).abs().max().item(), 4) if out.numel() else 0.0


def cases():
    yield "one decode", """
        off(paged_attention, [9], [1])                              # → 0.0
    """
    yield "one whole prompt: no query sees the future", """
        off(paged_attention, [6], [6])                              # → 0.0
    """
    yield "the tail of a prompt: the queries stand at the end of the context", """
        off(paged_attention, [20], [8])                             # → 0.0
    """
    yield "the three requests of the chapter, at three phases", """
        off(paged_attention, [37, 5, 20], [1, 5, 8])                # → 0.0
    """
    yield "contexts around the end of a block", """
        [off(paged_attention, [n], [1]) for n in (1, 3, 4, 5, 8)]   # → [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    yield "groups of 1, 2, 3 and 8 query heads", """
        off(paged_attention, [9, 4], [2, 1], heads=(4, 4))          # → 0.0
        off(paged_attention, [9, 4], [2, 1], heads=(4, 2))          # → 0.0
        off(paged_attention, [9, 4], [2, 1], heads=(6, 2))          # → 0.0
        off(paged_attention, [9, 4], [2, 1], heads=(8, 1))          # → 0.0
    """
    yield "block sizes of 1, 7 and 16", """
        [off(paged_attention, [19, 6], [4, 1], block_size=b) for b in (1, 7, 16)]   # → [0.0] * 3
    """
    yield "a head dimension that is no power of two", """
        off(paged_attention, [9], [3], head_dim=20)                 # → 0.0
    """
    yield "a request without queries, and one without a context", """
        off(paged_attention, [9, 6, 5], [1, 0, 2])                  # → 0.0
        off(paged_attention, [9, 0, 5], [1, 0, 2])                  # → 0.0
    """
    yield "a table with more blocks than the context needs", """
        k_cache, v_cache = torch.zeros(4, 2, 1, 1), torch.full((4, 2, 1, 1), torch.nan)
        v_cache[3, 0] = 6.0
        paged_attention(torch.zeros(1, 1, 1), k_cache, v_cache, [[3, 1, 0]], [1], [0, 1],
                        1.0).item()                                 # → 6.0
    """
    yield "two requests that share a block", """
        v_cache = torch.tensor([4.0, 8.0, 3.0, torch.nan, 9.0, torch.nan]).view(3, 2, 1, 1)
        out = paged_attention(torch.zeros(2, 1, 1), torch.zeros(3, 2, 1, 1), v_cache,
                              [[0, 1], [0, 2]], [3, 3], [0, 1, 2], 1.0)
        out.flatten().tolist()                                      # → [5.0, 7.0]
    """
    yield "the scale counts", """
        k_cache = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
        v_cache = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
        one = torch.ones(1, 1, 1)
        paged_attention(one, k_cache, v_cache, [[0]], [2], [0, 1], 1.0).item()      # ≈ 0.7311
        paged_attention(one, k_cache, v_cache, [[0]], [2], [0, 1], 2.0).item()      # ≈ 0.8808
    """
    yield "scores so large that exp would overflow", """
        k_cache = torch.tensor([1000.0, 0.0]).view(1, 2, 1, 1)
        v_cache = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
        paged_attention(torch.ones(1, 1, 1), k_cache, v_cache, [[0]], [2], [0, 1],
                        1.0).item()                                 # → 3.0
    """
