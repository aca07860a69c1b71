"""A sum over ranks, in each of its ways and at many sizes: what stands behind the limits of
`parallel.sums`.

Each rank holds [tokens, hidden] of the model's dtype, as behind the output product of a layer. On
GPUs the sums run in a CUDA graph, many in a row; on a CPU, through gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from paged.bench.common import check_output, machine
from paged.checks import whole_number
from paged.device import use_device
from paged.models.config import ModelConfig
from paged.parallel.ranks import Driver, Ranks, Worker, join
from paged.parallel.shard import Part
from paged.parallel.sums import TWO_SHOT, Sums

TOKENS = (1, 8, 32, 128, 256, 512, 2048)
IN_A_ROW = 20


class OneWay(Sums):
    """Sums that all go the same way."""

    def __init__(self, way: str, *args):
        super().__init__(*args)
        self.way = way

    def _way(self, x: torch.Tensor) -> str:
        return self.way if x.nbytes <= TWO_SHOT else "nccl"


@torch.inference_mode()
def samples(ranks: Ranks, way: str, num_tokens: int, hidden: int, repetitions: int) -> list[float]:
    """Microseconds a sum, of each repetition. Every rank must ask for the same."""
    on_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = ModelConfig("llama", ranks.size, hidden, ranks.size, 1, ranks.size, ranks.size, 2)
    sums = OneWay(way, Part(config, ranks.rank, ranks.size), 1, dtype, ranks.device)
    x = torch.zeros(num_tokens, hidden, dtype=dtype, device=ranks.device)

    def run() -> None:
        for _ in range(IN_A_ROW):
            sums.total(sums.place(x), x)

    run()
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    times = []
    for _ in range(repetitions + 3):
        begin = time.perf_counter()
        if on_gpu:
            graph.replay()
            torch.cuda.synchronize()
        else:
            run()
        times.append(round(1e6 * (time.perf_counter() - begin) / IN_A_ROW, 2))
    return times[3:]


def other_rank(size: int, device: str) -> None:
    """What the others run: their part of what rank 0 measures."""
    ranks = join(size, torch.device(device), other_rank, {"size": size, "device": device})
    assert isinstance(ranks, Worker)
    with ranks.together():
        while (order := ranks.receive()) is not None:
            samples(ranks, *order)
    ranks.close()


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench sums", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (%(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, metavar="RANKS",
                        help="GPUs, or processes on a CPU (%(default)s)")
    parser.add_argument("--hidden", type=int, default=4096,
                        help="numbers a token (%(default)s, as in an 8B model)")
    parser.add_argument("--repetitions", type=int, default=20, help="of each time (%(default)s)")
    parser.add_argument("--output", type=Path, help="write the record, with raw samples, here")
    args = parser.parse_args(argv)
    check_output(args.output)
    for name in ("hidden", "repetitions"):
        whole_number(f"--{name}", getattr(args, name), least=1)
    size, device = args.tensor_parallel_size, use_device(args.device).type
    whole_number("--tensor-parallel-size", size, least=2)
    ways = ("nccl", "one-shot", "two-shot") if device == "cuda" else ("gloo",)
    record: dict[str, Any] = machine("python -m paged bench sums") | {
        "unit": "us a sum", "ranks": size, "hidden": args.hidden, "rows": []
    }
    ranks = join(size, torch.device(device), other_rank, {"size": size, "device": device})
    assert isinstance(ranks, Driver)
    try:
        print(f"{'tokens':>7}" + "".join(f"{way:>10}" for way in ways))
        for num_tokens in TOKENS:
            row: dict[str, Any] = {"tokens": num_tokens}
            for way in ways:
                order = way, num_tokens, args.hidden, args.repetitions
                with ranks.together():
                    ranks.send(order)
                    row[way] = samples(ranks, *order)
            record["rows"].append(row)
            print(f"{num_tokens:>7}" + "".join(f"{statistics.median(row[way]):>10.1f}"
                                               for way in ways))
    finally:
        ranks.close()
    if args.output:
        args.output.write_text(json.dumps(record), encoding="utf-8")
    return 0
