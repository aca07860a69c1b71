"""The kernel benchmark counts bytes and operations right, deals inputs fairly, and its record can
be judged.

The times themselves need a GPU and are not asserted anywhere.
"""

import statistics
from dataclasses import replace

import pytest
import torch

from paged.__main__ import main
from paged.bench import kernels
from paged.kv_cache import take
from paged.lab.notebook import record


def test_bytes_and_operations_of_a_shape():
    """Against counting every (query, key) pair of the causal mask."""
    shape = kernels.Shape("mixed", "small", (5, 3, 4), (1, 3, 0))
    pairs = sum(key <= context - new + query for context, new in zip(shape.contexts, shape.queries)
                for query in range(new) for key in range(context))
    assert shape.flops == pairs * kernels.NUM_HEADS * kernels.HEAD_DIM * 2 * 2
    assert shape.bytes == 12 * 2 * kernels.NUM_KV_HEADS * kernels.HEAD_DIM * 2


def test_the_table_is_of_the_agreed_shapes():
    shapes = kernels.all_shapes()
    assert [s.name for s in shapes if s.kind == "decode" and s.block_size == 16] == [
        "1 × 8,192", "8 × 1,024", "16 × 4,096", "64 × 4,096", "256 × 1,024", "64 skewed"
    ]
    assert {s.block_size for s in shapes} >= {1, 16, 256}
    lengths = kernels.skewed_contexts()
    assert len(lengths) == 64 and min(lengths) >= 128 and max(lengths) <= 32_768
    assert lengths[:3] == (2005, 9063, 209)


def test_inputs_share_no_block_and_stand_for_their_shape():
    shape = kernels.Shape("mixed", "small", (40, 7, 33), (1, 7, 5), block_size=16)
    pool = torch.randn(2, 16 * 30, kernels.NUM_KV_HEADS, kernels.HEAD_DIM).to(kernels.DTYPE)
    inputs = kernels.Inputs(shape, pool, "cpu", sets=4)
    blocks = [
        table[row, :-(-context // 16)] for _, _, _, table, *_ in inputs.sets
        for row, context in enumerate(shape.contexts)
    ]
    assert len(inputs.sets) == 4 and len(set(torch.cat(blocks).tolist())) == 4 * (3 + 1 + 3)
    q, k, _, _, lengths, starts, _ = inputs.sets[0]
    assert len(q) == 13 and lengths.tolist() == [40, 7, 33] and starts.tolist() == [0, 1, 8, 13]
    assert k.data_ptr() == pool.data_ptr()
    with pytest.raises(ValueError,
                       match="needs 7 blocks of 16, and the memory of this card leaves 2"):
        kernels.Inputs(shape, pool[:, :32], "cpu", sets=4)


def test_an_fp8_pool_holds_numbers_in_blocks_of_any_size():
    pool = kernels.random_pool(512, True, "cpu")
    for block_size in (16, 3, 256, 1):
        shape = kernels.decode_shape(2, 20, block_size)
        shape = replace(shape, token_bytes=kernels.FP8_TOKEN_BYTES)
        inputs = kernels.Inputs(shape, pool, "cpu", sets=2)
        q, k, v, *rest = inputs.sets[0]
        assert k.shape[1:] == (block_size, kernels.NUM_KV_HEADS, kernels.HEAD_DIM)
        assert shape.bytes == 40 * 2 * kernels.NUM_KV_HEADS * (kernels.HEAD_DIM + 4)
        for cache in (k, v):
            rows = take(cache, torch.arange(len(cache)))
            assert rows.isfinite().all() and rows.unique().numel() > 50
        assert [name for name, *_ in kernels.contenders(shape, inputs)] == ["torch", "reference"]


def test_contiguous_inputs_are_the_same_keys():
    shape = kernels.decode_shape(2, 20)
    pool = torch.randn(2, 16 * 8, kernels.NUM_KV_HEADS, kernels.HEAD_DIM).to(kernels.DTYPE)
    inputs = kernels.Inputs(shape, pool, "cpu", sets=1)
    [(_, keys, _)] = inputs.contiguous(shape)
    table = inputs.sets[0][3]
    assert torch.equal(keys[1, :, 17], inputs.sets[0][1][table[1, 1], 1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_published_record_can_be_judged():
    """Machine, versions, commit, command and raw samples; and it makes the table."""
    published = record("kernels_h200")
    assert all(published[key] for key in ("device", "driver", "torch", "date", "commit", "command"))
    timed = [row for row in published["rows"] if "failed" not in row]
    assert all(
        len(row[key]) >= 20 for row in timed for key in ("call_us", "graph_us") if key in row)
    names = {(shape.name, shape.block_size) for shape in kernels.all_shapes()}
    assert names <= {(row["shape"], row["block_size"])
                     for row in timed if row["backend"] == "triton"}
    row = next(row for row in timed if row["shape"] == "64 × 4,096" and row["backend"] == "triton")
    share = row["bytes"] / statistics.median(row["graph_us"]) * 1e6 / published["copy_bytes_per_s"]
    assert f"{share:.2f} of copy" in kernels.table(published)
