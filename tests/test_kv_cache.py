"""The K and V tensors: what is written through slots comes back through block tables; nothing else
changes.

Protects: one allocation and one view of it a layer; slot −1 writes nothing (vLLM issue 43810); rows
that nobody wrote are never read; K and V as strided slices of a fused projection; block copies that
read first.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged import PagedKVCache, slot_mapping_for
from paged.fp8 import FP8, dequantize, quantize, scales_of
from paged.kv_cache import CacheSpec, copy_between, take
from tests.caches import fill_with_nan, kept, nan_cache

CACHES = pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["float32", "fp8"])


def tokens(n, kv, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, kv.num_kv_heads, kv.head_dim, generator=generator)


def test_layers_are_views_of_one_allocation():
    kv = PagedKVCache(3, 5, 4, 2, 8, dtype=torch.bfloat16)
    for layer in range(3):
        assert kv.k[layer].shape == kv.v[layer].shape == (5, 4, 2, 8)
        assert kv.k[layer].dtype == torch.bfloat16
    everything = {tensor.untyped_storage().data_ptr() for tensor in (*kv.k, *kv.v)}
    assert everything == {kv.data.untyped_storage().data_ptr()}
    assert kv.block_bytes == 2 * 3 * 4 * 2 * 8 * 2 and kv.block_bytes * 5 == kv.data.nbytes


@CACHES
@given(block_size=st.integers(1, 5), seq_len=st.integers(0, 12), seed=st.integers(0, 99),
       data=st.data())
def test_what_is_written_through_slots_comes_back_through_the_table(dtype, block_size, seq_len,
                                                                    seed, data):
    kv = nan_cache(num_layers=2, num_blocks=13, block_size=block_size, dtype=dtype)
    table = data.draw(st.permutations(range(13)))[:-(-seq_len // block_size)]
    slots = slot_mapping_for(table, range(seq_len), block_size)
    k, v = tokens(seq_len, kv, seed)
    cut = data.draw(st.integers(0, seq_len))  # in two chunks, the second as a tensor
    kv.write(1, slots[:cut], k[:cut], v[:cut])
    kv.write(1, torch.tensor(slots[cut:], dtype=torch.int32), k[cut:], v[cut:])
    for padding in ([], [-1, -1]):  # behind the context nothing is looked at
        got_k, got_v = kv.gather(1, table + padding, seq_len)
        assert torch.equal(got_k, kept(k, dtype)) and torch.equal(got_v, kept(v, dtype))
    written = ~torch.isnan(take(kv.k[1], torch.arange(13)).flatten(0, 1)[:, 0, 0])
    assert written.nonzero().flatten().tolist() == sorted(slots)
    untouched = nan_cache(num_layers=2, num_blocks=13, block_size=block_size, dtype=dtype).data[:,
                                                                                                0]
    assert torch.equal(kv.data[:, 0].view(torch.uint8), untouched.view(torch.uint8))


@CACHES
def test_padding_writes_nothing(dtype):
    """Batch of 3 in a graph for 4: through PyTorch's indexing, −1 is the last row of the last
    block."""
    kv = nan_cache(dtype=dtype)
    k, v = tokens(1, kv)
    kv.write(0, [15], k, v)
    before = take(kv.k[0], torch.arange(4)).flatten(0, 1).clone()
    padded_k, padded_v = tokens(4, kv, seed=1)
    kv.write(0, [0, 5, -1, -1], padded_k, padded_v)
    rows_k, rows_v = (take(part[0], torch.arange(4)).flatten(0, 1) for part in (kv.k, kv.v))
    assert torch.equal(rows_k[15], kept(k, dtype)[0]) and torch.equal(rows_v[15], kept(v, dtype)[0])
    assert torch.equal(rows_k[0], kept(padded_k, dtype)[0])
    assert torch.equal(rows_v[5], kept(padded_v, dtype)[1])
    changed = (~torch.isclose(rows_k, before, equal_nan=True)).flatten(1).any(-1)
    assert changed.nonzero().flatten().tolist() == [0, 5]
    kv.write(0, [-1, -1], padded_k[:2], padded_v[:2])
    kv.write(0, [], padded_k[:0], padded_v[:0])


@CACHES
def test_unused_rows_are_never_read(dtype):
    """A context of 3 in a block of 4: the fourth row is NaN and stays out."""
    kv = nan_cache(dtype=dtype)
    k, v = tokens(3, kv)
    kv.write(0, slot_mapping_for([2], range(3), 4), k, v)
    got_k, got_v = kv.gather(0, [2], 3)
    assert torch.equal(got_k, kept(k, dtype)) and not torch.isnan(got_v).any()
    empty_k, empty_v = kv.gather(0, [], 0)
    assert empty_k.shape == empty_v.shape == (0, 2, 3)


@CACHES
def test_strided_slices_of_a_fused_projection(dtype):
    kv = nan_cache(num_kv_heads=2, head_dim=3, dtype=dtype)
    qkv = torch.randn(5, (4 + 2 + 2) * 3)
    _, k, v = qkv.split([12, 6, 6], dim=1)
    k, v = k.view(5, 2, 3), v.view(5, 2, 3)
    assert not k.is_contiguous()
    kv.write(0, [3, 2, 1, 0, 7], k, v)
    got_k, got_v = kv.gather(0, [0, 1], 8)
    assert torch.equal(got_k[[3, 2, 1, 0, 7]], kept(k, dtype))
    assert torch.equal(got_v[[3, 2, 1, 0, 7]], kept(v, dtype))


def test_values_are_cast_to_the_type_of_the_cache():
    kv = nan_cache(dtype=torch.bfloat16)
    k, v = tokens(2, kv)
    kv.write(0, [0, 1], k, v)
    got_k, _ = kv.gather(0, [0], 2)
    assert got_k.dtype == torch.bfloat16 and torch.equal(got_k, k.bfloat16())


@CACHES
def test_copied_blocks_are_read_before_any_is_written(dtype):
    """A block that is the destination of one copy may be the source of another of the same step."""
    kv = nan_cache(num_layers=2, dtype=dtype)
    for layer in range(2):
        for block in range(3):
            k, v = tokens(4, kv, seed=10 * layer + block)
            kv.write(layer, slot_mapping_for([block], range(4), 4), k, v)
    before = kv.data.clone()
    kv.copy_blocks([(0, 1), (1, 2), (0, 3)])
    assert torch.equal(kv.data[:, :, 1], before[:, :, 0])
    assert torch.equal(kv.data[:, :, 2], before[:, :, 1])
    assert torch.equal(kv.data[:, :, 3], before[:, :, 0])
    assert torch.equal(kv.data[:, :, 0], before[:, :, 0])
    kv.copy_blocks([])
    host = kv.spec.allocate(2)  # what a swap does
    copy_between(kv, host, [(2, 0)])
    copy_between(host, kv, [(0, 0)])
    assert torch.equal(kv.data[:, :, 0], before[:, :, 1])
    (k, _), (want, _) = kv.gather(1, [0], 4), tokens(4, kv, seed=11)
    assert torch.equal(k, kept(want, dtype))


@pytest.mark.parametrize("name",
                         ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_a_shape_of_nothing_is_refused(name):
    shape = dict(num_layers=1, num_blocks=1, block_size=1, num_kv_heads=1, head_dim=1)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        PagedKVCache(**{**shape, name: 0})


def test_writes_that_do_not_fit_are_refused_and_write_nothing():
    kv = nan_cache()
    k, v = tokens(2, kv)
    for bad_k, bad_v in [(k[:1], v), (k, v[:1]), (k[:, :1], v), (k, v[..., :2])]:
        with pytest.raises(ValueError, match="2 slots of this cache take \\(2, 2, 3\\)"):
            kv.write(0, [0, 1], bad_k, bad_v)
    for slots in ([0, 16], [0, -2], [-1, 99]):
        with pytest.raises(IndexError, match="cache of 16 rows"):
            kv.write(0, slots, k, v)
    for slots, words in [([0.5, 1.0], "slot_mapping is of torch.float"),
                         ([[0], [1]], "has shape \\(2, 1\\)"),
                         (torch.tensor([0.5, 1]), "it must hold integers"),
                         (None, "slot_mapping is None"), ([True, False], "torch.bool"),
                         (3, "it must have 1 dimension"), ([0, None], "\\[0, None\\]")]:
        with pytest.raises(ValueError, match=words):
            kv.write(0, slots, k, v)
    for layer in (1, -1, 0.5):
        with pytest.raises(ValueError, match=f"layer is {layer}"):
            kv.write(layer, [0, 1], k, v)
    assert torch.isnan(kv.data).all()


def test_slots_of_any_integer_type():
    for kind in (torch.int32, torch.uint8, torch.int8):
        kv = nan_cache()
        k, v = tokens(2, kv)
        kv.write(0, torch.tensor([9, 2, 1, 2], dtype=kind)[::2], k, v)
        got_k, _ = kv.gather(0, torch.tensor([2, 0], dtype=kind), 6)
        assert torch.equal(got_k[[1, 5]], k)


def test_copies_that_do_not_fit_are_refused_and_copy_nothing():
    """Through PyTorch's indexing, −1 is the last block."""
    kv = nan_cache()
    before = kv.data.fill_(1.0).clone()
    for pairs in ([(-1, 0)], [(0, -1)], [(0, 1), (4, 2)]):
        with pytest.raises(IndexError, match="cache of 4 blocks"):
            kv.copy_blocks(pairs)
    with pytest.raises(ValueError, match="it must hold integers"):
        kv.copy_blocks([(0, 1.5)])
    assert torch.equal(kv.data, before)


def test_reads_that_do_not_fit_are_refused():
    kv = nan_cache()
    with pytest.raises(ValueError, match="9 tokens need 3 blocks of 4; the block table has 2"):
        kv.gather(0, [0, 1], 9)
    for table in ([0, 4], [-1, 0]):  # −1, the padding of a table, is no block
        with pytest.raises(IndexError, match="cache of 4 blocks"):
            kv.gather(0, table, 5)
    for seq_len in (-1, 2.5):
        with pytest.raises(ValueError, match=f"seq_len is {seq_len}"):
            kv.gather(0, [0], seq_len)
    for table in ([0.5], [[0]], [None]):
        with pytest.raises(ValueError, match="block_table"):
            kv.gather(0, table, 3)
    with pytest.raises(ValueError, match="layer is 1: this cache has layers 0 to 0"):
        kv.gather(1, [0], 3)


@given(seed=st.integers(0, 10**6), exponent=st.integers(-40, 30))
def test_a_quantized_row_is_off_by_one_part_in_sixteen_at_most(seed, exponent):
    """Of each of its numbers, but for those that are smaller than 2⁻¹⁵ of the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 40, generator=generator) * 2.0**exponent
    x[0, 0] = 0
    numbers, scales = quantize(x)
    assert numbers.shape == x.shape and scales.shape == x.shape[:-1]
    assert (numbers.float().abs().amax(-1) == 448).flatten().tolist() == [False] + [True] * 5
    error = (dequantize(numbers, scales) - x).abs()
    assert (error <= x.abs() / 16 * (1 + 1e-6) + scales[..., None] * 2**-10).all()


def test_a_broken_row_is_read_as_nan_and_its_neighbours_are_not():
    for broken in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2, 3, 8)
        x[1, 2, 5] = broken
        numbers, scales = quantize(x)
        assert scales[1, 2].isnan() and scales.isnan().sum() == 1
        back = dequantize(numbers, scales)
        assert back[1, 2].isnan().all() and back.isnan().sum() == 8


@pytest.mark.parametrize("shape, part", [((16, 8, 128), 16 * 8 * 132), ((1, 1, 1), 16),
                                         ((4, 2, 3), 64), ((3, 3, 64), 3 * 3 * 68 + 12)])
def test_scales_are_in_the_block_and_each_belongs_to_one_row(shape, part):
    """Rows, then scales, then nothing: no two share a byte, and a block begins at 16 bytes."""
    spec = CacheSpec(2, *shape, dtype=FP8)
    assert spec.block_bytes == 2 * 2 * part and part % 16 == 0
    kv = fill_with_nan(spec.allocate(3))
    assert kv.data.nbytes == 3 * kv.block_bytes
    seen = torch.zeros_like(kv.data, dtype=torch.int32)
    storage = kv.data.untyped_storage().data_ptr()
    for tensor in (*kv.k, *kv.v, *map(scales_of, (*kv.k, *kv.v))):
        assert tensor.untyped_storage().data_ptr() == storage
        offsets = torch.zeros((), dtype=torch.long)
        for size, stride in zip(tensor.shape, tensor.stride()):
            offsets = offsets[..., None] + torch.arange(size) * stride * tensor.itemsize
        first = tensor.storage_offset() * tensor.itemsize
        for byte in range(tensor.itemsize):
            seen.view(-1)[(offsets + first + byte).flatten()] += 1
    assert seen.max() == 1
    assert seen.sum() == 2 * 2 * 3 * shape[0] * shape[1] * (shape[2] + 4)


def test_half_the_bytes_of_bfloat16_but_for_the_scales():
    shape = dict(num_layers=28, block_size=16, num_kv_heads=8, head_dim=128)
    plain, small = (CacheSpec(**shape, dtype=dtype).block_bytes for dtype in (torch.bfloat16, FP8))
    assert plain / small == 2 * 128 / 132
