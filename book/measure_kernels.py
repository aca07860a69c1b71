"""Measure the decode kernels of the chapter *Kernels*: python book/measure_kernels.py [--output
FILE]

The code is taken from the chapter itself, from its cells tagged `version`, so that what is plotted
there is what is printed there. The last version is the package's own decode kernel. Times are of
calls inside a CUDA graph.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paged.attention import triton_backend
from paged.bench.common import machine
from paged.bench.kernels import (
    DTYPE,
    HEAD_DIM,
    NUM_KV_HEADS,
    Inputs,
    Shape,
    ceilings,
    decode_shape,
    graph_times,
    skewed_contexts,
)

CELL = re.compile(r"```\{code-cell\} ipython3\n:tags: \[(?:[^\]]*, )?version\]\n\n(.*?)```",
                  re.DOTALL)
HEADER = """import torch
import triton
import triton.language as tl
from paged.kernels.common import load_rows, tile_slots
"""


def versions_of(chapter: Path, folder: Path) -> list:
    """The chapter's functions whose docstring begins with "Version", imported from a file in
    `folder`."""
    path = folder / "versions.py"
    cells = CELL.findall(chapter.read_text(encoding="utf-8"))
    path.write_text("\n\n".join([HEADER, *cells]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("versions", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = filter(inspect.isfunction, vars(module).values())
    return [function for function in functions if (function.__doc__ or "").startswith("Version")]


@cache
def offsets(num_requests: int, device: torch.device) -> torch.Tensor:
    """Where each request's one query begins; made before anything is timed."""
    return torch.arange(num_requests + 1, dtype=torch.int32, device=device)


def equal_shares(q, k_cache, v_cache, tables, lengths, scale):
    """Version 6: the tiles of all requests on one line, cut into equal shares."""
    return triton_backend.run(q, k_cache, v_cache, tables, lengths, offsets(len(q), q.device),
                              scale, max_query_len=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="write the record, with raw samples, as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measurement needs a CUDA device")
    shapes = [
        decode_shape(64, 4096),
        decode_shape(1, 8192),
        Shape("decode", "64 skewed", skewed_contexts(), (1,) * 64)
    ]
    record = machine("python book/measure_kernels.py") | ceilings("cuda", 20) | {"rows": []}
    pool = torch.randn(2, 2**20, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    with tempfile.TemporaryDirectory() as folder:
        versions = [
            *versions_of(Path(__file__).with_name("kernels.md"), Path(folder)), equal_shares
        ]
        for shape in shapes:
            sets = [(q, k, v, table, lengths, scale) for q, k, v, table, lengths, _, scale in
                    Inputs(shape, pool, pool.device, sets=16).sets]
            want = equal_shares(*sets[0]).float()
            for version in versions:
                error = (version(*sets[0]).float() - want).norm() / want.norm()
                assert error < 1e-2, f"{version.__name__} differs by {error:.1e}"
                times = graph_times(version, sets, 20)
                record["rows"].append({
                    "version": version.__name__, "what": version.__doc__, "shape": shape.name,
                    "bytes": shape.bytes, "graph_us": times
                })
                median = statistics.median(times)
                share = shape.bytes / median * 1e6 / record["copy_bytes_per_s"]
                print(f"{shape.name:<12}{version.__name__:<20}{median:>10,.1f} µs {share:>6.2f} of "
                      "copy")
    if args.output:
        args.output.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
