"""What the first two chapters say in numbers, held to the published figures through the public
functions.

Protects the counts of projections, the bytes a token, the memory bill, the concurrency estimate,
the utilization of 200 requests, and the block budget of a measured card.
"""

import pytest

from paged.memory import (
    DTYPE_BYTES,
    GB,
    GiB,
    KiB,
    MiB,
    concurrent_requests,
    kv_bytes_per_token,
    num_blocks_in_budget,
    projections_with_cache,
    projections_without_cache,
    sample_requests,
    utilization_paged,
    utilization_reserved,
)

QWEN3_06B = dict(num_layers=28, num_kv_heads=8, head_dim=128)
QWEN25_7B = dict(num_layers=28, num_kv_heads=4, head_dim=128)


def test_projections_of_fifty_steps_after_a_hundred_tokens():
    without, with_cache = projections_without_cache(100, 50), projections_with_cache(100, 50)
    assert (without, with_cache) == (18_675, 450)
    assert round(100 * (1 - with_cache / without)) == 98


@pytest.mark.parametrize("context, steps", [(0, 1), (1, 0), (1, 1), (7, 13), (100, 50)])
def test_projections_are_a_count_of_tokens(context, steps):
    """Counted one by one instead of by formula: quadratic without a cache, linear with one."""
    recomputed = [token for step in range(steps) for token in range(context + step)]
    assert projections_without_cache(context, steps) == 3 * len(recomputed)
    assert projections_with_cache(context, steps) == 3 * len([*range(context), *range(steps)])


def test_bytes_a_token_of_qwen3():
    assert kv_bytes_per_token(**QWEN3_06B | {"num_layers": 1}) == 4_096
    assert kv_bytes_per_token(**QWEN3_06B) == 114_688 == 112 * KiB
    assert kv_bytes_per_token(**QWEN3_06B, dtype="float32") == 2 * 114_688
    assert kv_bytes_per_token(**QWEN3_06B, dtype="float8") == 114_688 // 2


def test_bytes_a_token_are_those_of_the_cache_itself():
    from paged import PagedKVCache
    from paged.fp8 import FP8

    kv = PagedKVCache(2, 3, 4, 5, 6)
    assert kv.block_bytes == 4 * kv_bytes_per_token(2, 5, 6, "float32")
    kv = PagedKVCache(2, 3, 4, 8, 6, dtype=FP8)  # a part of 320 bytes: nothing to fill up to 16
    assert kv.block_bytes == 4 * kv_bytes_per_token(2, 8, 6, "fp8")


def test_an_fp8_cache_has_nearly_twice_the_blocks():
    plain, small = (kv_bytes_per_token(**QWEN3_06B, dtype=dtype) for dtype in ("bfloat16", "fp8"))
    budget = dict(total=95 * GiB, utilization=0.9, used=2 * GiB, peak=0, current=0)
    blocks = [num_blocks_in_budget(**budget, block_bytes=16 * size) for size in (plain, small)]
    assert blocks[1] / blocks[0] == pytest.approx(2 * 128 / 132, rel=1e-4)


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="'int3'.*" + ", ".join(DTYPE_BYTES)):
        kv_bytes_per_token(**QWEN3_06B, dtype="int3")


@pytest.mark.parametrize("requests, gigabytes", [(1, 0.47), (8, 3.76), (32, 15.03), (128, 60.13)])
def test_bill_of_requests_of_4096_tokens(requests, gigabytes):
    assert round(requests * 4_096 * kv_bytes_per_token(**QWEN3_06B) / GB, 2) == gigabytes


def test_concurrency_on_an_80_gib_card():
    bytes_per_token = kv_bytes_per_token(**QWEN25_7B)
    assert bytes_per_token == 56 * KiB
    budget = (80 - 15 - 10) * GiB
    assert concurrent_requests(budget, bytes_per_token, 3_000, block_size=16) == 342
    assert concurrent_requests(budget, bytes_per_token, 3_000, reserved=32 * 1024) == 31


def test_utilization_of_the_two_hundred_requests():
    requests = sample_requests()
    assert len(requests) == 200 and requests == sample_requests(200, 0)
    assert all(100 <= prompt <= 2_000 and 20 <= output <= 1_500 for prompt, output in requests)
    assert round(100 * utilization_reserved(requests, 4_096), 1) == 46.2
    paged = [round(100 * utilization_paged(requests, size), 1) for size in (1, 16, 64, 256)]
    assert paged == [100.0, 99.6, 98.3, 93.2]


def test_utilization_of_one_request_by_hand():
    assert utilization_reserved([(3, 2)], 8) == 5 / 8
    assert [utilization_paged([(3, 2)], size) for size in (1, 2, 4, 5)] == [1, 5 / 6, 5 / 8, 1]


def test_block_budget_of_the_h20():
    """From the printed inputs one block too few; from inputs within their rounding, the printed
    count."""
    block_bytes = 256 * kv_bytes_per_token(**QWEN3_06B)
    assert block_bytes == 29_360_128 == 28 * MiB
    rounded = dict(total=95.085 * GiB, utilization=0.9, used=1.66 * GiB, peak=1.599 * GiB,
                   current=1.16 * GiB)
    assert num_blocks_in_budget(**rounded, block_bytes=block_bytes) == 3_052
    within = rounded | dict(total=95.0854 * GiB, used=1.6551 * GiB)
    assert num_blocks_in_budget(**within, block_bytes=block_bytes) == 3_053
    assert 2 * 28 * 3_053 * 256 * 8 * 128 * 2 == 3_053 * block_bytes == 89_636_470_784


def test_block_budget_refuses_a_full_card():
    with pytest.raises(ValueError,
                       match=r"no room for a block of 28.0 MiB.*Raise gpu_memory_utilization"):
        num_blocks_in_budget(total=4 * GiB, utilization=0.5, used=2 * GiB, peak=1, current=1,
                             block_bytes=28 * MiB)


def test_room_for_exactly_one_block_is_one_block():
    card = dict(total=100, utilization=0.5, used=20, peak=10, current=5)
    assert num_blocks_in_budget(**card, block_bytes=25) == 1
    assert num_blocks_in_budget(**card, block_bytes=12) == 2
    with pytest.raises(ValueError, match="no room for a block"):
        num_blocks_in_budget(**card, block_bytes=26)
