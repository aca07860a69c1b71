"""The attention kernels against bandwidth and matrix rate of the card: `python -m paged bench
kernels`.

Every shape is measured for every backend that can run it here, beside PyTorch's SDPA over the same
K and V laid out contiguously. Two times are taken: one call after the other as Python makes them,
and, for kernels that never wait for the CPU, the same calls inside a CUDA graph. CUDA events, after
a warm-up; the calls take turns over inputs that together exceed the L2 cache; K, V and Q are
random, and so is the order of the blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from paged.attention import BACKENDS, resolve
from paged.attention import Shape as AttentionShape
from paged.bench.common import check_output, machine
from paged.fp8 import FP8, part_bytes, rows_of, scales_of
from paged.kv_cache import CacheSpec
from paged.memory import kv_bytes_per_token

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
DTYPE = torch.bfloat16
TOKEN_BYTES = kv_bytes_per_token(1, NUM_KV_HEADS, HEAD_DIM)  # K and V
FP8_TOKEN_BYTES = kv_bytes_per_token(1, NUM_KV_HEADS, HEAD_DIM, "fp8")
REPETITIONS = 30  # samples of each time
NO_GRAPH = ("torch", "reference")  # backends that look at lengths on the CPU


@dataclass(frozen=True)
class Shape:
    """A batch: the context and the new tokens of each request, and the block size."""

    kind: str
    name: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    block_size: int = 16
    token_bytes: int = TOKEN_BYTES

    @property
    def bytes(self) -> int:
        """K and V, read once."""
        return sum(self.contexts) * self.token_bytes

    @property
    def flops(self) -> int:
        """Two matrix products over the (query, key) pairs that the causal mask leaves."""
        pairs = sum(n * (c - n) + n * (n + 1) // 2 for c, n in zip(self.contexts, self.queries))
        return 4 * NUM_HEADS * HEAD_DIM * pairs


def decode_shape(num_requests: int, context: int, block_size: int = 16) -> Shape:
    """So many requests with the same context, one new token each."""
    return Shape("decode", f"{num_requests} × {context:,}", (context,) * num_requests,
                 (1,) * num_requests, block_size)


def skewed_contexts() -> tuple[int, ...]:
    """64 lengths between 128 and 32,768, evenly spread over their logarithm."""
    generator = torch.Generator().manual_seed(0)
    return tuple(int(2**(7 + 8 * torch.rand(1, generator=generator).item())) for _ in range(64))


def all_shapes() -> list[Shape]:
    """The table of decode shapes, the block sizes of one of them, and the prefill shapes."""
    decodes = [
        decode_shape(*size) for size in ((1, 8192), (8, 1024), (16, 4096), (64, 4096), (256, 1024))
    ]
    skewed = Shape("decode", "64 skewed", skewed_contexts(), (1,) * 64)
    pages = [decode_shape(64, 4096, size) for size in (1, 2, 3, 4, 8, 17, 32, 64, 128, 256)]
    prefills = [
        Shape("prefill", "4 × 4,096 new of 4,096", (4096,) * 4, (4096,) * 4),
        Shape("prefill", "16 × 512 new of 4,096", (4096,) * 16, (512,) * 16),
        Shape("mixed", "64 decodes at 1,024 with 2 × 2,048 new", (1024,) * 64 + (2048,) * 2,
              (1,) * 64 + (2048,) * 2)
    ]
    return [*decodes, skewed, *pages, *prefills]


def blocks_of(pool: torch.Tensor, block_size: int) -> list[torch.Tensor]:
    """K and V of a layer, [num_blocks, block_size, num_kv_heads, head_dim], out of a pool of rows
    or, for FP8, of bytes."""
    if pool.dtype != torch.uint8:
        return [x[:len(x) // block_size * block_size].unflatten(0, (-1, block_size)) for x in pool]
    shape = block_size, NUM_KV_HEADS, HEAD_DIM
    size = part_bytes(*shape)
    parts = [rows_of(x[:len(x) // size * size].view(-1, size), *shape) for x in pool]
    for part in parts:
        scales_of(part).fill_(1 / 64)
    return parts


def random_pool(tokens: int, fp8: bool, device: str) -> torch.Tensor:
    """Random K and V of so many tokens; of an FP8 cache bytes, none of them NaN."""
    if not fp8:
        return torch.randn(2, tokens, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=DTYPE)
    return torch.randint(256, (2, tokens * FP8_TOKEN_BYTES // 2), device=device,
                         dtype=torch.uint8) & 0xF7


class Inputs:
    """Random q, K, V and block tables of a shape, in several sets that together exceed the L2
    cache."""

    def __init__(self, shape: Shape, pool: torch.Tensor, device: torch.device, sets: int):
        generator = torch.Generator().manual_seed(0)
        needed = [-(-context // shape.block_size) for context in shape.contexts]
        k, v = blocks_of(pool, shape.block_size)
        if sum(needed) > len(k):
            raise ValueError(
                f"{shape.name} needs {sum(needed)} blocks of {shape.block_size}, and the memory "
                f"of this card leaves {len(k)}")
        sets = max(1, min(sets, len(k) // sum(needed), -(-2**29 // shape.bytes)))
        order = torch.randperm(len(k), generator=generator)[:sets * sum(needed)].int()
        starts = torch.tensor([0, *itertools.accumulate(shape.queries)], dtype=torch.int32,
                              device=device)
        lengths = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
        self.sets = []
        for blocks in order.split(sum(needed)):
            table = torch.nn.utils.rnn.pad_sequence(list(blocks.split(needed)),
                                                    batch_first=True).to(device)
            q = torch.randn(sum(shape.queries), NUM_HEADS, HEAD_DIM, device=device, dtype=DTYPE)
            self.sets.append((q, k, v, table, lengths, starts, HEAD_DIM**-0.5))

    def contiguous(self, shape: Shape) -> list[tuple]:
        """Q, K and V as SDPA takes them, [requests, heads, tokens, head_dim]; equal lengths
        only."""
        context, queries, requests = shape.contexts[0], shape.queries[0], len(shape.contexts)
        sets = []
        for q, k, v, table, *_ in self.sets:
            keys, values = (x[table.long()].flatten(1, 2)[:, :context].transpose(1, 2)
                            for x in (k, v))
            sets.append((q.view(requests, queries, NUM_HEADS, HEAD_DIM).transpose(1,
                                                                                  2), keys, values))
        return sets


def call_times(function: Callable, sets: Sequence[tuple], repetitions: int) -> list[float]:
    """Microseconds of each call, one after the other without waiting in between."""
    for inputs in itertools.islice(itertools.cycle(sets), 3):
        function(*inputs)
    events = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(repetitions)]
    torch.cuda.synchronize()
    for (start, end), inputs in zip(events, itertools.cycle(sets)):
        start.record()
        function(*inputs)
        end.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end) * 1000, 2) for start, end in events]


def graph_times(function: Callable, sets: Sequence[tuple], repetitions: int) -> list[float]:
    """Microseconds of a call inside a CUDA graph: a sample is a replay of several calls over their
    number."""
    calls = list(itertools.islice(itertools.cycle(sets), max(8, len(sets))))
    for inputs in calls[:3]:
        function(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in calls:
            function(*inputs)
    return [round(t / len(calls), 2) for t in call_times(graph.replay, [()], repetitions)]


def contenders(shape: Shape, inputs: Inputs) -> Iterable[tuple[str, Callable, list[tuple]]]:
    """(name, function, input sets) of every backend that runs here, and of contiguous SDPA."""
    q, k = inputs.sets[0][:2]
    _, block_size, num_kv_heads, head_dim = k.shape
    served = AttentionShape(q.shape[1], q.dtype,
                            CacheSpec(1, block_size, num_kv_heads, head_dim, k.dtype), q.device)
    for name in BACKENDS:
        try:
            attention = resolve(name, served)
        except ValueError:
            continue
        longest = {"max_query_len": max(shape.queries)} if name not in NO_GRAPH else {}
        yield name, partial(attention.run, **longest), inputs.sets
    if k.dtype != FP8 and shape.kind != "mixed" and len(set(shape.contexts)) == 1:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(shape.queries[0],
                                  shape.contexts[0]) if shape.kind == "prefill" else None
        yield ("sdpa",
               lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
               inputs.contiguous(shape))


def measure(shape: Shape, pool: torch.Tensor) -> list[dict]:
    """One row a contender: raw samples in microseconds, or the reason why there are none."""
    rows = []
    inputs = Inputs(shape, pool, pool.device, sets=16)
    for name, function, sets in contenders(shape, inputs):
        row = {
            "kind": shape.kind, "shape": shape.name, "block_size": shape.block_size,
            "backend": name, "bytes": shape.bytes, "flops": shape.flops
        }
        try:
            row["call_us"] = call_times(function, sets, REPETITIONS)
            if name not in NO_GRAPH:
                row["graph_us"] = graph_times(function, sets, REPETITIONS)
        except (RuntimeError,
                ValueError) as error:  # out of memory, or a mask that SDPA does not take
            row["failed"] = str(error).splitlines()[0]
        rows.append(row)
    return rows


def measure_store(pool: torch.Tensor, num_tokens: int = 16_384) -> list[dict]:
    """The store kernel on slices of a fused projection, and a plain copy of as many bytes."""
    from paged.kernels.store import store

    caches = blocks_of(pool, 16)
    blocks = torch.randperm(len(caches[0]))[:4 * num_tokens // 16]
    slots = (blocks[:, None] * 16 + torch.arange(16)).view(4, num_tokens).to(pool.device)
    fused = torch.randn(4, num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=pool.device,
                        dtype=DTYPE)
    sets = [(x[:, NUM_HEADS:-NUM_KV_HEADS], x[:, -NUM_KV_HEADS:], *caches, s)
            for x, s in zip(fused, slots)]
    source, target = torch.randn(2, 4, num_tokens, TOKEN_BYTES // DTYPE.itemsize,
                                 device=pool.device).to(DTYPE)
    written = TOKEN_BYTES if pool.dtype != torch.uint8 else FP8_TOKEN_BYTES
    rows = []
    for name, function, inputs, size in (("triton", store, sets, TOKEN_BYTES + written),
                                         ("copy", lambda a, b: b.copy_(a), list(zip(
                                             source, target)), 2 * TOKEN_BYTES)):
        rows.append({
            "kind": "store", "shape": f"{num_tokens:,} tokens", "block_size": 16, "backend": name,
            "bytes": num_tokens * size, "flops": 0, "call_us": call_times(
                function, inputs, REPETITIONS), "graph_us": graph_times(
                    function, inputs, REPETITIONS)
        })
    return rows


def ceilings(device: str, repetitions: int) -> dict:
    """Bytes a second of a large copy, read and written, and FLOP a second of a large matrix
    product."""
    size = min(2**31, torch.cuda.mem_get_info()[0] // 16)
    source = torch.randn(size, device=device, dtype=DTYPE)
    target = torch.empty_like(source)
    copy = statistics.median(call_times(target.copy_, [(source,)], repetitions))
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=DTYPE)
    product = statistics.median(call_times(torch.mm, [(a, b)], repetitions))
    return {
        "copy_bytes_per_s": 2 * source.nbytes / copy * 1e6,
        "matrix_flop_per_s": 2 * 8192**3 / product * 1e6
    }


def table(record: dict) -> str:
    """The record as text: median microseconds, and the share of the ceiling that each is."""
    copy = record["copy_bytes_per_s"]
    lines = [
        f"{record['device']}: copy {copy / 1e9:,.0f} GB/s, matrix product "
        f"{record['matrix_flop_per_s'] / 1e12:,.0f} TFLOP/s", "",
        f"{'shape':<40}{'page':>5}  {'backend':<10}{'in a graph':>12}{'as a call':>12}   of the "
        "ceiling"
    ]
    for row in record["rows"]:
        head = f"{row['shape']:<40}{row['block_size']:>5}  {row['backend']:<10}"
        if "failed" in row:
            lines.append(f"{head}  {row['failed'][:60]}")
            continue
        times = [
            statistics.median(row[key]) if key in row else None for key in ("graph_us", "call_us")
        ]
        best = next(filter(None, times)) / 1e6
        share = (f"{row['flops'] / best / 1e12:,.0f} TFLOP/s" if row["kind"] in ("prefill", "mixed")
                 else f"{row['bytes'] / best / copy:.2f} of copy")
        lines.append(head + "".join(f"{t:>9,.1f} µs" if t else f"{'–':>12}"
                                    for t in times) + f"   {share}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure every shape, print the table and write the record; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paged bench kernels",
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="also write the record, with raw samples, as JSON")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto",
                        help="of K and V: bfloat16 like Q, or fp8 (%(default)s)")
    args = parser.parse_args(argv)
    check_output(args.output)
    fp8 = args.kv_cache_dtype == "fp8"
    if not torch.cuda.is_available():
        raise ValueError(
            "this benchmark needs a CUDA device: Triton's interpreter shows what a kernel "
            "computes, and its time says nothing about a GPU")
    command = "python -m paged bench kernels" + " --kv-cache-dtype fp8" * fp8
    record = machine(command) | ceilings("cuda", REPETITIONS)
    record |= {
        "dtype": "bfloat16", "kv_cache_dtype": "fp8" if fp8 else "bfloat16",
        "heads": [NUM_HEADS, NUM_KV_HEADS, HEAD_DIM], "rows": []
    }
    tokens = min(2**20, torch.cuda.mem_get_info()[0] // 2 // TOKEN_BYTES) // 256 * 256
    pool = random_pool(tokens, fp8, "cuda")
    token_bytes = FP8_TOKEN_BYTES if fp8 else TOKEN_BYTES
    for shape in tqdm(all_shapes(), desc="shapes"):
        try:
            record["rows"] += measure(replace(shape, token_bytes=token_bytes), pool)
        except ValueError as error:
            tqdm.write(str(error))
    record["rows"] += measure_store(pool)
    print(table(record))
    if args.output:
        args.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0
