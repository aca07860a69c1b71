"""The Triton attention kernels give what the float32 reference gives, whatever lengths, shapes and
rubbish.

Without a GPU they run in Triton's interpreter on small inputs; the tests marked gpu repeat that at
full size and in bfloat16. In every case the blocks are dealt in random order, every cache row that
no token wrote is NaN, and block tables are padded with a block number that does not exist.
"""

import pytest
import torch

from paged.attention import Shape, paged_attention, reference, resolve, triton_backend
from paged.device import Card
from paged.fp8 import FP8, dequantize, quantize, scales_of
from paged.kv_cache import CacheSpec, PagedKVCache, put, take

pytest.importorskip("triton")
from paged.kernels import decode as triton_decode  # noqa: E402
from paged.kernels import prefill as triton_prefill  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CACHES = pytest.mark.parametrize("cache", [None, FP8], ids=["plain", "fp8"])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}

# (context, new tokens) of each request
DECODES = [(5, 1), (130, 1), (1, 1), (64, 1), (33, 1)]
PREFILLS = [(37, 37), (5, 5), (70, 8), (1, 1)]
MIXTURE = [(40, 1), (0, 0), (9, 9), (65, 0), (0, 1), (131, 66), (1, 1), (77, 2)]


def batch(requests, num_heads, num_kv_heads, head_dim, block_size, dtype=torch.float32, seed=0,
          cache=None):
    """q, caches, block tables, lengths, offsets and scale of a batch, on DEVICE; the caches of
    their own dtype, or of q's."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_size) for context, _ in requests]
    num_blocks = sum(blocks) + 2
    deal = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(requests), max(blocks) + 1), 2**30, dtype=torch.int32)
    k, v = torch.full((2, num_blocks * block_size, num_kv_heads, head_dim), float("nan"))
    for request, (context, _) in enumerate(requests):
        for index in range(blocks[request]):
            block = tables[request, index] = next(deal)
            first = block * block_size
            rows = slice(first, first + min(block_size, context - index * block_size))
            k[rows] = torch.randn(k[rows].shape, generator=generator)
            v[rows] = torch.randn(v[rows].shape, generator=generator)
    queries = torch.tensor([new for _, new in requests])
    q = torch.randn(int(queries.sum()), num_heads, head_dim, generator=generator)
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    lengths = torch.tensor([context for context, _ in requests], dtype=torch.int32)
    kv = PagedKVCache(1, num_blocks, block_size, num_kv_heads, head_dim, cache or dtype, DEVICE)
    for rows, part in ((k, kv.k[0]), (v, kv.v[0])):
        put(part, torch.arange(len(rows), device=DEVICE), rows.to(DEVICE, dtype))
    return (q.to(DEVICE, dtype), kv.k[0], kv.v[0], tables.to(DEVICE), lengths.to(DEVICE),
            starts.to(DEVICE), head_dim**-0.5)


def assert_close(got, want):
    """Relative error of the whole, by norm; NaN fails."""
    error = (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)
    assert error <= TOLERANCE[got.dtype], f"relative error {error:.2e}"


def assert_as_reference(requests, *shape, dtype=torch.float32, cache=None, **options):
    inputs = batch(requests, *shape, dtype=dtype, cache=cache)
    want = reference.run(inputs[0].float(), *inputs[1:])
    got = triton_backend.run(*inputs, **options)
    assert_close(got, want)
    assert torch.equal(got, triton_backend.run(*inputs, **options)), "two runs differ"


@pytest.mark.parametrize("block_size, cache", [(1, None), (3, None), (16, None), (256, None),
                                               (1, FP8), (5, FP8)])
@pytest.mark.parametrize("requests", [DECODES, PREFILLS, MIXTURE],
                         ids=["decodes", "prefills", "mixture"])
def test_any_block_size(requests, block_size, cache):
    assert_as_reference(requests, 4, 2, 16, block_size, cache=cache)


@CACHES
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(2, 2, 64), (3, 1, 80), (16, 1, 24),
                                                               (6, 2, 96), (5, 1, 8), (2, 1, 256)])
def test_any_heads(num_heads, num_kv_heads, head_dim, cache):
    assert_as_reference([(19, 1), (40, 5), (34, 1), (3, 3)], num_heads, num_kv_heads, head_dim, 5,
                        cache=cache)


@CACHES
def test_float16(cache):
    assert_as_reference(MIXTURE, 4, 2, 32, 4, dtype=torch.float16, cache=cache)


@pytest.mark.parametrize("capability", [8, 9])  # whose card moves bits, or converts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_any_size_in_an_fp8_cache(dtype, capability, monkeypatch):
    """Scales from 10⁻⁶ to 10³, and rows of zeros: neither p × scale nor q · K may leave float16."""
    if DEVICE == "cpu":
        card = Card(4, capability, 227 * 1024)
        for kernels in (triton_decode, triton_prefill):
            monkeypatch.setattr(kernels, "device_properties", lambda device: card)
    q, k, v, *rest = batch([(70, 1), (33, 20)], 4, 2, 32, 4, dtype, cache=FP8)
    sizes = torch.logspace(-6, 3, k.shape[0], device=DEVICE)[:, None, None]
    scales_of(v).mul_(sizes)
    scales_of(k).mul_(sizes.flip(0).clamp(max=1))
    written = ~scales_of(k).isnan()
    written[:, ::2] = False
    scales_of(v)[written & (sizes > 1)] = 2.0**-126
    got = triton_backend.run(q, k, v, *rest)
    assert_close(got, reference.run(q.float(), k, v, *rest))


def test_a_broken_row_is_seen():
    """NaN and infinity among numbers: every output that the row belongs to is NaN, and no other."""
    for broken in (float("nan"), float("inf"), float("-inf")):
        q, k, v, *rest = batch([(9, 1), (12, 5)], 2, 1, 16, 4, cache=FP8)
        row = torch.randn(1, 1, 16, device=DEVICE)
        row[..., 3] = broken
        first = rest[0][1, 0].long() * 4  # the first token of the second request
        put(k, first[None], row)
        got = triton_backend.run(q, k, v, *rest)
        assert got[1:].isnan().all() and not got[:1].isnan().any()
        assert torch.equal(got.isnan(), reference.run(q, k, v, *rest).isnan())


def test_more_heads_share_a_kv_head_than_a_small_prefill_program_has_rows():
    assert_as_reference([(40, 6), (9, 9), (20, 1)], 20, 1, 32, 4, dtype=torch.float16)


def test_counters_are_left_as_zeros(monkeypatch):
    """Calls that follow each other count with the same ones; one left behind would spoil a later
    call."""
    kept = torch.zeros(1 << 14, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(triton_decode, "counters", lambda device: kept)
    for requests in (DECODES, [(300, 1)], MIXTURE):
        assert_as_reference(requests, 4, 2, 16, 4)
        assert not kept.any()


def test_pure_decode_with_the_hint():
    assert_as_reference(DECODES + [(0, 1)], 4, 2, 16, 4, max_query_len=1)


@CACHES
def test_context_cut_into_many_shares(cache):
    """One long context: every program has a piece of it, and adding them up takes several
    rounds."""
    assert_as_reference([(1400, 1), (3, 1)], 1, 1, 16, 7, cache=cache)


def test_more_requests_than_one_vector():
    assert_as_reference([(1 + n % 3, 1) for n in range(66)], 1, 1, 16, 2)


def test_rows_of_others_are_left_alone():
    """Each kernel writes the rows of its own requests, all of them, and no other."""
    from paged.kernels.decode import decode
    from paged.kernels.prefill import prefill

    inputs = batch(MIXTURE, 4, 2, 16, 4)
    one = torch.repeat_interleave(inputs[5].diff() == 1, inputs[5].diff())
    for kernel, own in ((decode, one), (lambda *a: prefill(*a, min_queries=2), ~one)):
        out = torch.full_like(inputs[0], float("nan"))
        kernel(*inputs, out)
        assert torch.equal(out.isnan().any(-1).any(-1), ~own)


@pytest.mark.parametrize("requests", [DECODES, PREFILLS, MIXTURE],
                         ids=["decodes", "prefills", "mixture"])
@pytest.mark.parametrize("heads, cache", [((4, 2), None), ((4, 2), FP8), ((5, 1), None),
                                          ((2, 2), None)])
def test_the_prefill_kernel_alone_serves_every_mixture(requests, heads, cache):
    """With min_queries=1 one launch takes decodes too; the backend leaves these to the decode
    kernel."""
    from paged.kernels.prefill import prefill

    inputs = batch(requests, *heads, 16, 4, cache=cache)
    out = torch.full_like(inputs[0], float("nan"))
    prefill(*inputs, out)
    assert_close(out, reference.run(*inputs))


@CACHES
def test_through_paged_attention_with_ragged_lists_and_strided_queries(cache):
    q, k, v, tables, lengths, starts, scale = batch(MIXTURE, 4, 2, 16, 4, cache=cache)
    kv = PagedKVCache(1, *k.shape, dtype=k.dtype, device=DEVICE)
    kv.k[0], kv.v[0] = k, v
    ragged = [row[:-(-n // 4)] for row, n in zip(tables.tolist(), lengths.tolist())]
    wide = torch.randn(len(q), 12, 16, device=DEVICE)
    wide[:, 3:7] = q
    got = paged_attention(wide[:, 3:7], kv, 0, ragged, lengths.tolist(), starts.tolist(), scale,
                          "triton")
    assert_close(got, reference.run(q, k, v, ragged, lengths, starts, scale))
    assert len(paged_attention(q[:0], kv, 0, [[]], [0], [0, 0], scale, backend="triton")) == 0


def test_refusals_name_the_reason(monkeypatch):

    def shape(dtype=torch.float32, head_dim=16, cache=None):
        spec = CacheSpec(1, 4, 2, head_dim, cache or dtype)
        return Shape(2, dtype, spec, torch.device("cpu"))

    assert "float64" in triton_backend.why_not(shape(torch.float64))
    assert "float64" in triton_backend.why_not(shape(cache=torch.float64))
    assert "512" in triton_backend.why_not(shape(head_dim=512))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on a GPU machine it is not
    assert "bfloat16" in triton_backend.why_not(shape(torch.bfloat16))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in triton_backend.why_not(shape())
    with pytest.raises(ValueError, match="cannot run here: .*TRITON_INTERPRET=1"):
        resolve("triton", shape())
    monkeypatch.setattr("paged.device.find_spec", lambda name: None)
    assert "not installed" in triton_backend.why_not(shape())


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 8, 128, 16), (16, 1, 128, 1), (9, 3, 64, 256),
                                   (5, 5, 80, 3), (12, 4, 96, 17), (4, 2, 256, 128)])
def test_large(shape, dtype, cache):
    requests = [(3000, 1), (700, 700), (4097, 513), (0, 1), (1, 1), (2048, 1), (129, 128), (0, 0),
                (6000, 1)]
    assert_as_reference(requests, *shape, dtype=dtype, cache=cache)
    assert_as_reference([(200 + 37 * n, 1) for n in range(80)], *shape, dtype=dtype, cache=cache,
                        max_query_len=1)


@pytest.mark.gpu
@CACHES
def test_pool_beyond_31_bits(cache):
    """Offsets past 2³¹ elements of K and of V: the last blocks of a pool of 2³¹ + elements each."""
    block_size, heads, head_dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * heads * head_dim) + 600
    kv = PagedKVCache(1, num_blocks, block_size, heads, head_dim, cache or torch.bfloat16, "cuda")
    small = batch([(1000, 1), (900, 300)], 16, heads, head_dim, block_size, dtype=torch.bfloat16)
    q, k, v, tables, lengths, starts, scale = small
    shift = num_blocks - len(k)
    slots = torch.arange(len(k) * block_size, device="cuda") + shift * block_size
    kv.write(0, slots, k.flatten(0, 1), v.flatten(0, 1))
    last = torch.arange(shift, num_blocks, device="cuda")
    want = dequantize(*quantize(k)) if cache else k
    assert torch.equal(take(kv.k[0], last).nan_to_num(), want.nan_to_num())
    got = triton_backend.run(q, kv.k[0], kv.v[0], tables + shift, lengths, starts, scale)
    want = reference.run(q.float(), kv.k[0][shift:], kv.v[0][shift:], tables, lengths, starts,
                         scale)
    assert_close(got, want)


@pytest.mark.gpu
@CACHES
def test_one_cuda_graph_for_every_mixture_of_lengths(cache):
    q, k, v, tables, lengths, starts, scale = batch([(3000, 1)] * 8, 16, 8, 128, 16,
                                                    dtype=torch.bfloat16, cache=cache)
    graph = torch.cuda.CUDAGraph()
    triton_backend.run(q, k, v, tables, lengths, starts, scale, max_query_len=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = triton_backend.run(q, k, v, tables, lengths, starts, scale, max_query_len=1)
    for seed in range(5):
        torch.manual_seed(seed)
        lengths.copy_(torch.randint(0, 3001, (8,)))
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, reference.run(q.float(), k, v, tables, lengths, starts, scale))


def test_pieces_that_are_added_up_in_several_rounds(monkeypatch):
    """A card of 40 processors cuts one context into more pieces than are added up at once."""
    card = triton_decode.device_properties(torch.device("cpu"))
    monkeypatch.setattr(triton_decode, "device_properties",
                        lambda device: card._replace(processors=40))
    assert_as_reference([(700, 1)], 1, 1, 16, 7)
