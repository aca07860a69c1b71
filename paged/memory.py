"""What the KV cache costs: projections saved, bytes a token, blocks in a budget, share of memory in
use.

Plain arithmetic, in tokens and bytes. GB is 10⁹ bytes, GiB is 2³⁰.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paged.slots import blocks_needed

GB, GiB, MiB, KiB = 10**9, 2**30, 2**20, 2**10

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
SCALE_BYTES = 4


def projections_without_cache(context: int, steps: int) -> int:
    """Q, K and V projections when every decode step projects the whole sequence again."""
    return sum(3 * (context + step) for step in range(steps))


def projections_with_cache(context: int, steps: int) -> int:
    """Q, K and V projections when K and V are kept: the context once, then one token a step."""
    return 3 * context + 3 * steps


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int,
                       dtype: str = "bfloat16") -> int:
    """Bytes of K and V of one token over all layers; "float8" is the numbers alone, "fp8" with a
    scale of SCALE_BYTES for each head. Raises ValueError for a dtype it does not know."""
    rows = 2 * num_layers * num_kv_heads
    if dtype == "fp8":
        return rows * (head_dim + SCALE_BYTES)
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join((*DTYPE_BYTES, 'fp8'))}")
    return rows * head_dim * DTYPE_BYTES[dtype]


def num_blocks_in_budget(total: float, utilization: float, used: float, peak: float, current: float,
                         block_bytes: int) -> int:
    """Blocks that fit beside everything else on the card; all arguments in bytes but utilization.

    Args:
        total: memory of the card.
        utilization: share of it that may be used.
        used: in use now, by this process and all others.
        peak, current: of this process's tensors, during the warm-up and now. A forward pass will
            need their difference again.

    Raises ValueError, with the numbers, if not even one block fits.
    """
    free = total * utilization - used - peak + current
    num_blocks = int(free // block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"{total * utilization / GiB:.2f} GiB may be used, {used / GiB:.2f} GiB are, and a "
            f"step takes {(peak - current) / GiB:.2f} GiB more: no room for a block of "
            f"{block_bytes / MiB:.1f} MiB. Raise gpu_memory_utilization, lower "
            f"max_num_batched_tokens, or free the card")
    return num_blocks


def concurrent_requests(budget_bytes: float, bytes_per_token: int, context: int,
                        reserved: int | None = None, block_size: int = 16) -> int:
    """Requests that fit a budget: `reserved` tokens each, or, if None, blocks for `context` tokens
    each."""
    tokens = blocks_needed(context, block_size) * block_size if reserved is None else reserved
    return int(budget_bytes // (tokens * bytes_per_token))


def sample_requests(num_requests: int = 200, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of the requests that the utilization figures are about."""
    rng = random.Random(seed)
    return [(rng.randint(100, 2000), rng.randint(20, 1500)) for _ in range(num_requests)]


def utilization_reserved(requests: Sequence[tuple[int, int]], max_len: int) -> float:
    """Share of the memory that holds tokens when every request reserves max_len of them."""
    return sum(prompt + output for prompt, output in requests) / (len(requests) * max_len)


def utilization_paged(requests: Sequence[tuple[int, int]], block_size: int) -> float:
    """Share of the memory that holds tokens when every request holds just the blocks it needs."""
    lengths = [prompt + output for prompt, output in requests]
    return sum(lengths) / (block_size
                           * sum(blocks_needed(length, block_size) for length in lengths))
