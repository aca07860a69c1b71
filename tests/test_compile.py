"""Every Triton kernel is compiled for an H200 and for smaller cards, on any machine: the compiler
needs no GPU.

Protects what the interpreter cannot: code that only Python accepts, tiles that do not fit the
shared memory of a card, and values that do not fit its registers. The launches are those of the
package's own functions, caught before they reach a GPU.
"""

import os
import subprocess
import sys

import pytest

from paged.runner import MIXED_SIZES

SCRIPT = '''
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
         torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}

def compile_only(kernel, *args, grid=None, warmup=None, **options):
    """Takes the place of a launch."""
    named = {k: v for k, v in options.items() if k in kernel.arg_names}
    bound = dict(zip(kernel.arg_names, args)) | named
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {k: options[k] for k in ("num_warps", "num_stages", "maxnreg") if k in options}
    kind = (kernel.__name__, *map(str, (signature, constants, attributes, options, grid and (
        grid[0] // 132 if kernel.__name__ == "_decode_kernel" else 0))))
    if kind in compiled_kinds:
        return
    compiled_kinds.add(kind)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    compiled.add(kernel.__name__)
    shared = binary.metadata.shared
    assert shared <= memory, f"{kernel.__name__} wants {shared} of {memory} bytes"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        report = subprocess.run([OBJDUMP, "-res-usage", file.name], capture_output=True, text=True,
                                check=True).stdout
    spilled = max(map(int, re.findall(r"STACK:(\\d+)", report)))
    assert spilled <= most, (f"{kernel.__name__} keeps {spilled} bytes a thread outside its "
                             f"registers: {constants}")
    if kernel.__name__ == "_decode_kernel":  # all of its programs run at once, on 132 processors
        programs = grid[0] // 132
        assert programs * (shared + 1024) <= memory + 1024 or programs == 1

compiled, compiled_kinds = set(), set()
# Bytes a thread may spill; float32 is for checking.
most = 2048 if sys.argv[4] == "float32" else 256
OBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
capability, memory = int(sys.argv[6]), int(sys.argv[7]) * 1024

JITFunction.run = compile_only
from paged.fp8 import FP8
from paged.kernels import elementwise, prepare, products, sample
from paged.kv_cache import PagedKVCache
from paged.seats import Seats
from paged import device as devices
from paged.models import persistent
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.seats import Prepared
from paged.kernels import common as triton_tile
from paged.kernels import decode as triton_decode
from paged.kernels import prefill as triton_prefill
from paged.kernels import store as triton_store
card = devices.Card(132, capability // 10, memory)
for module in (triton_tile, products, triton_decode, triton_prefill, persistent, devices):
    module.device_properties = lambda device: card

heads, kv_heads, dim = map(int, sys.argv[1:4])
dtype = getattr(torch, sys.argv[4])
stored = FP8 if sys.argv[8] == "fp8" else dtype
of_heads_only = sys.argv[9] == "heads"
kv = PagedKVCache(1, 4, 16, kv_heads, dim, stored)
k, v = kv.k[0], kv.v[0]
hidden, inner = 1024, 3072
rotation, head_norm = torch.zeros(64, dim), torch.ones(dim, dtype=dtype)
for tokens in map(int, sys.argv[5].split(",")):
    ints = torch.zeros(tokens, dtype=torch.int32)
    x, q = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, heads, dim, dtype=dtype)
    qkv = torch.zeros((heads + 2 * kv_heads) * dim, hidden, dtype=dtype)
    on_heads = (None, ints, ints.long(), rotation, head_norm, head_norm, 1e-6, k, v, heads)
    elementwise.rotate_and_store(torch.zeros(tokens, len(qkv), dtype=dtype), x, *on_heads)
    few = ints[:1024]  # no step has more requests than seats
    starts = torch.zeros(len(few) + 1, dtype=torch.int32)
    for early in (False, True):
        triton_decode.decode(q, k, v, few[:, None], few, starts, 0.1, torch.empty_like(q), early)
    triton_prefill.prefill(q, k, v, few[:, None], few, starts, 0.1, torch.empty_like(q),
                           min_queries=2)
    squares, zeros = torch.zeros(tokens, 16), partial(torch.zeros, dtype=dtype)
    if tokens <= 128:
        products.qkv_product(x, squares, qkv, *on_heads)
    if tokens in (1, persistent.MOST_TOKENS) and card.capability >= 8:
        # One program a multiprocessor: all of them run at once if one fits.
        config = ModelConfig("qwen3", 9, hidden, inner, 1, heads, kv_heads, dim, qk_norm=True)
        layers = persistent.Layers(Decoder(config, dtype=dtype), kv, rotation)
        layers.together = True
        step = Prepared(x, squares[:, :1].contiguous(), ints, ints.long(), ints[:, None])
        layers.run(step, ints, torch.zeros(tokens + 1, dtype=torch.int32), 0.1)
    if of_heads_only:
        continue
    elementwise.silu_mul(zeros(tokens, 2 * inner), x, 1e-6)
    if tokens <= 128:
        products.product(q.flatten(1), zeros(hidden, heads * dim), residual=x)
        products.product(zeros(tokens, inner), zeros(hidden, inner), residual=x)
        products.product(x, zeros(2 * inner, hidden), 1e-6, squares, silu=True)
    for rows in {min(tokens, 256), 1}:
        few, starts = ints[:rows], torch.zeros(rows + 1, dtype=torch.int32)
        prepare.prepare(ints, few, few, few, starts, ints[:, None], ints, x, 16)
        prepare.prepare(ints, few, few, few, starts, ints[:, None], ints, x, 16, first_token=7)
triton_store.store(q[:, :kv_heads], q[:, :kv_heads], k, v, ints.long())
modules = [triton_decode, triton_prefill, triton_store]
if not of_heads_only:
    modules += [elementwise, prepare, products, sample]
    seats = Seats(4, 1, 151936, torch.device("cpu"))
    ints = ints[:256]
    sample.sample(torch.zeros(len(ints), 151936, dtype=dtype), ints, ints, ints, seats, ints[None],
                  ints[:1])
for module in modules:
    for name in vars(module):
        other = {"_store_kernel" if stored == FP8 else "_fp8_store_kernel"}
        assert not name.endswith("_kernel") or name in compiled | other, f"{name} was not compiled"
'''


# All kernels, or only those that depend on heads and cache.
@pytest.mark.parametrize(
    "capability, memory, heads, kv_heads, dim, dtype, tokens, cache, kernels",
    [
        (90, 227, 16, 8, 128, "bfloat16", "32,128,8192", "plain", "all"),  # H100, H200
        (90, 227, 16, 2, 80, "float32", "5", "plain", "heads"),
        (75, 64, 9, 3, 64, "float16", "5", "plain", "all"),  # T4
        # Groups of 8, 32 and 1 query heads.
        (90, 227, 32, 4, 128, "bfloat16", "5", "plain", "heads"),
        (90, 227, 32, 1, 128, "bfloat16", "5", "plain", "heads"),
        (80, 163, 8, 8, 256, "bfloat16", "9", "plain", "heads"),
        (89, 99, 8, 8, 256, "float32", "5", "plain", "heads"),  # L4, RTX 4090
        (90, 227, 16, 8, 128, "bfloat16", "128", "fp8", "heads"),
        (75, 64, 9, 3, 64, "float16", "5", "fp8", "heads")
    ])
def test_every_kernel_compiles(capability, memory, heads, kv_heads, dim, dtype, tokens, cache,
                               kernels, tmp_path):
    compile_all(capability, memory, heads, kv_heads, dim, dtype, tokens, cache, kernels, tmp_path)


# Tokens of a decode step as they are captured for 256 seats, and of steps with chunks.
SIZES = ",".join(map(str, sorted({1, 2, 4, *range(8, 257, 8), *MIXED_SIZES})))


@pytest.mark.skipif(not os.environ.get("PAGED_EVERYTHING"),
                    reason="minutes a card: PAGED_EVERYTHING=1 runs it")
@pytest.mark.parametrize("cache", ["plain", "fp8"])
@pytest.mark.parametrize("card, capability, memory", [("T4", 75, 64), ("A100", 80, 163),
                                                      ("A10", 86, 99), ("L4, RTX 4090", 89, 99),
                                                      ("H100, H200", 90, 227),
                                                      ("RTX 5090", 120, 99)])
def test_every_size_on_every_card(card, capability, memory, cache, tmp_path):
    dtype = "float16" if capability < 80 else "bfloat16"
    compile_all(capability, memory, 16, 8, 128, dtype, SIZES, cache, "all", tmp_path)


def compile_all(capability, memory, heads, kv_heads, dim, dtype, tokens, cache, kernels, folder):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    arguments = map(str, (heads, kv_heads, dim, dtype, tokens, capability, memory, cache, kernels))
    result = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], env=environment,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
