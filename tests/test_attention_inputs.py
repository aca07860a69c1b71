"""What does not fit together is refused in one sentence, the same by every backend; odd layouts are
read rightly.

Tables and lengths on a CPU are looked at whether they come as lists or as tensors: unchecked, a
Triton kernel reads outside the cache.
"""

import numpy as np
import pytest
import torch

from paged import EngineConfig, PagedKVCache, paged_attention
from paged.attention import BACKENDS, Shape, resolve
from paged.models.decoder import random_decoder
from paged.startup import cache_spec, make_runner
from tests.small_models import TINY_LLAMA
from tests.test_attention_reference import CACHES, paged_batch

pytest.importorskip("triton")
SERVED = ["reference", "torch"] + ([] if torch.cuda.is_available() else ["triton"]
                                   )  # of tensors on a CPU
AS_LISTS = [
    pytest.param(lambda x: x, id="lists"),
    pytest.param(torch.tensor, id="tensors"),
    pytest.param(np.array, id="arrays")
]


def two_requests(cache=torch.float32):
    """A decode and a chunk of two: q, cache, tables, lengths and offsets, and what the reference
    makes of them."""
    tables = [[3, 1, 4], [0, 2, 5]]
    q, kv, _, starts = paged_batch([5, 9], [1, 2], 4, 2, 8, 4, 6, tables, cache=cache)
    return (q, kv, tables, [5, 9], starts), paged_attention(q, kv, 0, tables, [5, 9], starts, 0.3)


def refusal(backend, *, q, kv, tables, lengths, starts, layer=0, scale=0.3):
    with pytest.raises(ValueError) as error:
        paged_attention(q, kv, layer, tables, lengths, starts, scale, backend=backend)
    return str(error.value)


def spread(values, device="cpu"):
    """The same numbers as a tensor whose neighbours do not lie side by side."""
    tensor = torch.tensor(values, dtype=torch.int32)
    wide = torch.full((*tensor.shape, 2), 2**30, dtype=torch.int32, device=device)
    wide[..., 0] = tensor
    return wide[..., 0]


@CACHES
@pytest.mark.parametrize("backend", SERVED)
def test_strided_tables_and_lengths(backend, cache):
    (q, kv, tables, lengths, starts), want = two_requests(cache)
    transposed = torch.tensor(tables, dtype=torch.int32).T.contiguous().T
    wide = torch.cat([transposed, torch.full((2, 4), 2**30, dtype=torch.int32)], 1)[:, :5]
    for given in (spread(tables), transposed, wide, transposed.long(), tables):
        assert given is tables or not given.is_contiguous() or given.dtype == torch.int64
        got = paged_attention(q, kv, 0, given, spread(lengths), spread(starts), 0.3,
                              backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@CACHES
@pytest.mark.parametrize("backend", SERVED)
def test_numbers_of_any_integer_type(backend, cache):
    (q, kv, tables, lengths, starts), want = two_requests(cache)
    for kind in (np.array, np.uint8, lambda x: torch.tensor(x, dtype=torch.uint8), tuple,
                 lambda x: [torch.tensor(row) for row in x]):
        got = paged_attention(q, kv, 0, kind(tables), kind(lengths), kind(starts), 0.3,
                              backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    beyond = [table + [2**40, -1] for table in tables]  # behind the context nothing counts
    got = paged_attention(q, kv, 0, beyond, lengths, starts, 0.3, backend=backend)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@CACHES
@pytest.mark.parametrize("kind", AS_LISTS)
@pytest.mark.parametrize("changes, words", [
    (dict(tables=[[3, 6, 4], [0, 2, 5]]),
     "request 0 has block 6 in its table: this cache has blocks 0 to 5"),
    (dict(tables=[[3, 1, 4], [0, 2, -1]]), "request 1 has block -1 in its table"),
    (dict(tables=[[3, 1], [0, 2]]),
     "request 1: 9 tokens need 3 blocks of 4; the block table has 2"),
    (dict(tables=[[3, 1, 4]]), "1 block tables, 2 lengths and 3 offsets"),
    (dict(lengths=[5, 1]), "request 1 has 2 queries and a context of 1 tokens"),
    (dict(lengths=[-1, 9]), "request 0 has 1 queries and a context of -1 tokens"),
    (dict(starts=[0, 1, 2]), "must rise from 0 to the 3 rows of q"),
    (dict(starts=[1, 1, 3]), "must rise from 0"),
    (dict(starts=[0, 4, 3]), "must rise from 0"),
    (dict(lengths=[5.0, 9.5]), "seq_lens is of torch.float"),
    (dict(starts=[0.0, 1.0, 3.0]), "query_start_loc is of torch.float"),
    (dict(lengths=[[5, 9]]), "seq_lens has shape (1, 2): it must have 1 dimension"),
    (dict(tables=[[3.0, 1.0, 4.0], [0.0, 2.0, 5.0]]), "it must hold integers"),
    (dict(tables=[0, 1]), "it must have"),
    (dict(tables=[[[0], [1]]]), "it must have"),
    (dict(lengths=[True, True]), "seq_lens is of torch.bool"),
])
def test_tables_and_lengths_that_do_not_fit(kind, changes, words, cache):
    (q, kv, tables, lengths, starts), _ = two_requests(cache)
    given = dict(tables=tables, lengths=lengths, starts=starts) | changes
    given = {name: kind(value) for name, value in given.items()}
    said = {refusal(backend, q=q, kv=kv, **given) for backend in SERVED}
    assert len(said) == 1 and words in said.pop()


@CACHES
@pytest.mark.parametrize("changes, words", [
    (dict(q=torch.zeros(3, 0, 8)), "q is (3, 0, 8); this cache needs"),
    (dict(q=torch.zeros(3, 3, 8)), "a multiple of 2 heads"),
    (dict(q=torch.zeros(3, 32)), "q is (3, 32)"),
    (dict(q=torch.zeros(3, 4, 8, dtype=torch.int32)),
     "q is torch.int32 on cpu: it must be a floating-point tensor"),
    (dict(q=torch.zeros(3, 4, 8, device="meta")),
     "on meta: it must be a floating-point tensor on cpu"),
    (dict(q=[[[0.0] * 8] * 4] * 3), "q is a list"),
    (dict(q=None), "q is a NoneType"),
    (dict(tables=None), "block_tables is None: it must be one list of blocks a request"),
    (dict(tables=[None, None]), "block_tables[0] is None: it must hold integers"),
    (dict(tables="01"), "block_tables[0] is '0'"),
    (dict(lengths=None), "seq_lens is None: it must hold integers"),
    (dict(lengths=5), "seq_lens has shape (): it must have 1 dimension"),
    (dict(lengths=[5, None]), "seq_lens is [5, None]"),
    (dict(starts=[]), "0 offsets"),
    (dict(starts=[0, 1, 2**70]), "query_start_loc is [0, 1, "),
    (dict(layer=1), "layer is 1: this cache has layers 0 to 0"),
    (dict(layer=-1), "layer is -1"),
    (dict(layer=0.0), "layer is 0.0: it must be an integer"),
    *((dict(scale=scale), f"scale is {scale!r}: it must be a finite number above 0")
      for scale in (None, "0.3", float("nan"), float("inf"), -0.3, 0, 1j)),
])
def test_odd_arguments(changes, words, cache):
    (q, kv, tables, lengths, starts), _ = two_requests(cache)
    given = dict(q=q, kv=kv, tables=tables, lengths=lengths, starts=starts) | changes
    said = {refusal(backend, **given) for backend in SERVED}
    assert len(said) == 1 and words in said.pop()


@pytest.mark.parametrize("backend", [None, 3, ["triton"], "Triton"])
def test_a_backend_that_is_none(backend):
    (q, kv, *batch), _ = two_requests()
    with pytest.raises(
            ValueError,
            match="unknown attention backend .*: choose one of auto, flash, triton, torch"):
        paged_attention(q, kv, 0, *batch, 0.3, backend=backend)


@CACHES
def test_whole_numbers_serve_as_scale(cache):
    (q, kv, *batch), _ = two_requests(cache)
    outputs = [paged_attention(q, kv, 0, *batch, 1, backend=backend) for backend in SERVED]
    for got in outputs[1:]:
        torch.testing.assert_close(got, outputs[0], atol=1e-5, rtol=1e-4)


def test_the_choice_of_auto_has_a_name():
    shape = Shape(4, torch.float32, PagedKVCache(1, 2, 4, 2, 8).spec, torch.device("cpu"))
    assert resolve("auto", shape).name == "torch"
    assert [resolve(name, shape).name for name in SERVED] == SERVED and set(SERVED) < set(BACKENDS)
    decoder = random_decoder(TINY_LLAMA)
    runner = make_runner(decoder, cache_spec(decoder, 4), EngineConfig(num_blocks=4))
    assert runner.attention.name == "torch"


@pytest.mark.parametrize("backend", SERVED)
def test_the_cache_may_be_narrower_than_the_model(backend):
    (q, kv, *batch), _ = two_requests()
    narrow = PagedKVCache(1, 6, 4, 2, 8, dtype=torch.float16)
    narrow.data.copy_(kv.data)
    kv.data.copy_(narrow.data)  # what is left of it, for the judge
    got = paged_attention(q, narrow, 0, *batch, 0.3, backend=backend)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, paged_attention(q, kv, 0, *batch, 0.3), atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_on_a_gpu_strides_are_read_and_shapes_and_types_refused(backend, cache):
    (q, kv, *batch), want = two_requests(cache)
    on_gpu = PagedKVCache(1, 6, 4, 2, 8, cache, device="cuda")
    on_gpu.data.copy_(kv.data)
    given = [spread(values, "cuda") for values in batch]
    got = paged_attention(q.cuda(), on_gpu, 0, *given, 0.3, backend=backend)
    torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)
    for place, value in ((0, given[0].float()), (0, given[0][0]), (1, given[1].bool()),
                         (2, given[2][None])):
        with pytest.raises(ValueError, match="it must h"):
            paged_attention(q.cuda(), on_gpu, 0, *given[:place], value, *given[place + 1:], 0.3,
                            backend=backend)
