"""The specification of paged attention against contiguous SDPA, and the batched PyTorch backend
against it.

Protects three requests at different phases in one batch, and every mixture around them, with unused
rows full of NaN.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from paged import PagedKVCache, paged_attention, slot_mapping_for
from paged.fp8 import FP8
from tests.caches import kept, nan_cache

BACKENDS = ["reference", "torch"]
CACHES = pytest.mark.parametrize("cache", [torch.float32, FP8], ids=["float32", "fp8"])


def paged_batch(contexts, new_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks,
                tables, seed=0, cache=torch.float32):
    """A cache full of NaN but for the contexts, and each context's K and V contiguously, as that
    cache keeps them."""
    g = torch.Generator().manual_seed(seed)
    kv = nan_cache(1, num_blocks, block_size, num_kv_heads, head_dim, cache)
    q = torch.randn(sum(new_tokens), num_heads, head_dim, generator=g)
    contiguous = []
    for context, table in zip(contexts, tables):
        k = torch.randn(context, num_kv_heads, head_dim, generator=g)
        v = torch.randn(context, num_kv_heads, head_dim, generator=g)
        kv.write(0, slot_mapping_for(table, range(context), block_size), k, v)
        contiguous.append((kept(k, cache), kept(v, cache)))
    starts = [0]
    for n in new_tokens:
        starts.append(starts[-1] + n)
    return q, kv, contiguous, starts


def contiguous_attention(q, k, v, scale):
    """Contiguous SDPA in float32, queries at the end of the context."""
    if len(k) == 0 or len(q) == 0:
        return torch.zeros_like(q)
    mask = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q.transpose(0, 1),
                                          k.repeat_interleave(group, 1).transpose(0, 1),
                                          v.repeat_interleave(group, 1).transpose(0, 1),
                                          attn_mask=mask, scale=scale).transpose(0, 1)


def deal(contexts, block_size):
    """Block tables with the blocks dealt out one at a time in turn."""
    tables, block = [[] for _ in contexts], 0
    while any(len(t) * block_size < c for t, c in zip(tables, contexts)):
        for table, context in zip(tables, contexts):
            if len(table) * block_size < context:
                table.append(block)
                block += 1
    return tables


@CACHES
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_requests_at_different_phases(backend, cache):
    torch.manual_seed(0)
    contexts, new_tokens = [37, 5, 20], [1, 5, 8]
    tables = deal(contexts, 4)
    assert tables == [[0, 3, 6, 8, 10, 12, 13, 14, 15, 16], [1, 4], [2, 5, 7, 9, 11]]
    q, kv, contiguous, starts = paged_batch(contexts, new_tokens, 8, 2, 64, 4, 32, tables,
                                            cache=cache)
    out = paged_attention(q, kv, 0, tables, contexts, starts, 64**-0.5, backend=backend)
    for i, (k, v) in enumerate(contiguous):
        rows = slice(starts[i], starts[i + 1])
        assert (out[rows] - contiguous_attention(q[rows], k, v, 64**-0.5)).abs().max() < 1e-5


@st.composite
def batches(draw):
    block_size = draw(st.integers(1, 6))
    contexts = draw(st.lists(st.integers(0, 23), min_size=1, max_size=4))
    new_tokens = [draw(st.integers(0, c)) if c else draw(st.integers(0, 1)) for c in contexts]
    needed = [-(-c // block_size) for c in contexts]
    num_blocks = sum(needed) + draw(st.integers(1, 4))
    order = draw(st.permutations(range(num_blocks)))
    tables, start = [], 0
    for n in needed:
        tables.append(list(order[start:start + n]))
        start += n
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 1), (6, 3)]))
    return block_size, contexts, new_tokens, tables, num_blocks, heads, draw(
        st.sampled_from([3, 8, 20]))


@pytest.mark.parametrize("backend", BACKENDS)
@given(batch=batches(), as_tensors=st.booleans(), cache=st.sampled_from([torch.float32, FP8]))
def test_any_batch_equals_contiguous_attention(backend, batch, as_tensors, cache):
    block_size, contexts, new_tokens, tables, num_blocks, (num_heads,
                                                           num_kv_heads), head_dim = batch
    q, kv, contiguous, starts = paged_batch(contexts, new_tokens, num_heads, num_kv_heads, head_dim,
                                            block_size, num_blocks, tables, cache=cache)
    arguments = tables, contexts, starts
    if as_tensors:
        width = max(map(len, tables))
        padded = [t + [0] * (width - len(t)) for t in tables]
        arguments = (torch.tensor(padded, dtype=torch.int32).reshape(len(tables), width),
                     torch.tensor(contexts,
                                  dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))
    out = paged_attention(q, kv, 0, *arguments, 0.3, backend=backend)
    want = torch.cat([
        contiguous_attention(q[starts[i]:starts[i + 1]], k, v, 0.3)
        for i, (k, v) in enumerate(contiguous)
    ])
    assert out.shape == q.shape
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


def test_inputs_that_do_not_fit_are_refused():
    kv = PagedKVCache(1, 4, 4, 2, 8)
    q = torch.zeros(3, 4, 8)
    for q_, tables, lens, starts, words in [
        (q[:, :3], [[0]], [3], [0, 3], "multiple of 2 heads"),
        (q[..., :5], [[0]], [3], [0, 3], "8]"),
        (q, [[0]], [3, 1], [0, 3], "n, n and n \\+ 1"),
        (q, [[0]], [3], [0, 2], "must rise from 0 to the 3 rows"),
        (q, [[0]], [2], [0, 3], "3 queries and a context of 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            paged_attention(q_, kv, 0, tables, lens, starts, 1.0)
    with pytest.raises(ValueError, match="unknown attention backend 'fast'"):
        paged_attention(q, kv, 0, [[0]], [3], [0, 3], 1.0, backend="fast")
    with pytest.raises(ValueError, match="5 tokens need 2 blocks of 4; the block table has 1"):
        paged_attention(q, kv, 0, [[0]], [5], [0, 3], 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_is_read_that_a_table_does_not_name(backend):
    """A table too short for its context, beside a longer one, once read block 0 in its place."""
    kv = PagedKVCache(1, 4, 4, 2, 8)
    q = torch.zeros(2, 4, 8)
    for tables, words in [([[0], [1, 2]], "5 tokens need 2 blocks of 4; the block table has 1"),
                          ([[0, -1], [1, 2]], "block -1"), ([[0, 4], [1, 2]], "blocks 0 to 3")]:
        with pytest.raises(ValueError, match=words):
            paged_attention(q, kv, 0, tables, [5, 8], [0, 1, 2], 1.0, backend=backend)
    short, lengths, starts = (torch.tensor(x, dtype=torch.int32)
                              for x in ([[0], [1]], [5, 4], [0, 1, 2]))
    with pytest.raises(ValueError, match="blocks of 4"):
        paged_attention(q, kv, 0, short, lengths, starts, 1.0, backend=backend)
    with pytest.raises(ValueError, match="2 queries and a context of 1"):
        paged_attention(q, kv, 0, short[:1], lengths[:1] - 4, starts[:2] * 2, 1.0, backend=backend)
