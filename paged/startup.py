"""Between loaded weights and the first request: warm-up, memory budget, one allocation, graphs.

The cache takes what is left of the card's share, so everything else must be known first. What a
step needs beside the weights shows only when a step runs: the warm-up runs the largest ones
(max_num_batched_tokens, as prompts as long as they may be; and every seat drawing through the
filters) over a small cache, and captures the largest graphs, before the pool is sized.

    total × utilization
    │ weights │ others on the card │ activations of a step │ graphs │ K/V blocks …         │
    └──────── used now ───────────┘└── peak − current ─────┘
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from paged.config import EngineConfig, Speedups
from paged.device import enough_memory
from paged.engine import Engine
from paged.fp8 import FP8
from paged.kv_cache import CacheSpec
from paged.memory import GiB, num_blocks_in_budget
from paged.models.decoder import Decoder
from paged.runner import ModelRunner
from paged.sampling import SamplingParams
from paged.slots import blocks_needed
from paged.trace import Trace

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
CPU_KV_BYTES = GiB
"""Memory that the cache takes on a CPU at most, where num_blocks does not say otherwise."""


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note how long what is inside takes."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def cache_spec(decoder: Decoder, block_size: int, dtype: str = "auto") -> CacheSpec:
    """What a block of a model's cache holds; dtype "auto" is the model's. ValueError for others
    than KV_CACHE_DTYPES."""
    if dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype is {dtype!r}: choose {', '.join(KV_CACHE_DTYPES)}")
    c = decoder.config
    stored = {"auto": decoder.embedding.dtype, "fp8": FP8}.get(dtype) or getattr(torch, dtype)
    return CacheSpec(c.num_layers, block_size, c.num_kv_heads, c.head_dim, stored)


def make_runner(decoder: Decoder, spec: CacheSpec, config: EngineConfig,
                attention_backend: str = "auto", speedups: Speedups = Speedups(),
                use_tqdm: bool = True) -> ModelRunner:
    """The runner for a model on its device, with its cache, and its graphs where it has some."""
    kv = spec.allocate(config.num_blocks, decoder.embedding.device)
    host_kv = None
    if config.preemption == "swap":
        host_kv = spec.allocate(config.num_host_blocks or config.num_blocks)
    with enough_memory(
            f"the {'graphs' if speedups.graphs else 'buffers'} of a step beside a pool of "
            f"{config.num_blocks} blocks ({kv.data.nbytes / GiB:.2f} GiB)",
            "Lower num_blocks, gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or "
            "do without graphs (enforce_eager)", kv.data.device):
        runner = ModelRunner(decoder, kv, config, attention_backend, host_kv, speedups)
        if runner.use_graphs:
            runner.capture(use_tqdm)
    return runner


def cpu_num_blocks(spec: CacheSpec, config: EngineConfig) -> int:
    """Blocks on a CPU: as many as could ever be in use, within CPU_KV_BYTES."""
    wanted = config.max_num_seqs * blocks_needed(config.max_model_len, spec.block_size)
    return max(1, min(wanted, CPU_KV_BYTES // spec.block_bytes))


@dataclass(frozen=True)
class MemoryBudget:
    """The budget formula's terms as measured on the card, in bytes; see
    `memory.num_blocks_in_budget`.

    `graphs` is what a runner keeps beside its cache: graphs, and the buffers of a step.
    """

    total: int
    utilization: float
    used: int
    peak: int
    current: int
    graphs: int
    block_bytes: int
    warm_up_seconds: float

    @property
    def num_blocks(self) -> int:
        """Blocks that fit. Raises ValueError, with the numbers, if none does."""
        return num_blocks_in_budget(self.total, self.utilization, self.used + self.graphs,
                                    self.peak, self.current, self.block_bytes)


def largest_prompts(config: EngineConfig) -> tuple[int, int]:
    """How many prompts of how many tokens fill a step, each as long as it may be."""
    length = min(config.max_model_len, config.max_num_batched_tokens)
    return min(config.max_num_seqs, config.max_num_batched_tokens // length), length


def warm_up(engine: Engine, after_each: Callable[[], object] = lambda: None) -> None:
    """Run the two steps that take most memory beside the weights, through an idle engine without
    prefix caching.

    The first computes as many tokens as a step may, as prompts as long as they may be. In the
    second every seat draws a token through filters and log-probabilities: float32 rows of the whole
    vocabulary, several times over.
    """
    c = engine.config
    for number, length, params in ((*largest_prompts(c), SamplingParams(max_tokens=1)),
                                   (c.max_num_seqs, 1,
                                    SamplingParams(max_tokens=1, top_p=0.5, logprobs=1))):
        for _ in range(number):
            engine.add_request([0] * length, params)
        while engine.has_unfinished():
            engine.step()
        after_each()


def measure_budget(decoder: Decoder, spec: CacheSpec, config: EngineConfig, utilization: float,
                   attention_backend: str = "auto", speedups: Speedups = Speedups(),
                   trace: Trace | None = None, use_tqdm: bool = True) -> MemoryBudget:
    """Warm up with the largest steps and measure what they take; the kernels are compiled on the
    way.

    config: the engine's, but for num_blocks. Raises MemoryError, with the numbers, when the card
    has no room for these steps.
    """
    start = time.perf_counter()
    number, length = largest_prompts(config)
    num_blocks = max(number * blocks_needed(length, spec.block_size), config.max_num_seqs)
    small = replace(config, num_blocks=num_blocks, enable_prefix_caching=False,
                    preemption="recompute")
    quiet = replace(speedups, graphs=False, run_ahead=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with (enough_memory(f"a step of {config.max_num_batched_tokens} tokens",
                        "Lower max_num_batched_tokens or max_num_seqs, or free the card",
                        decoder.embedding.device),
          tqdm(total=2 + speedups.graphs, desc="Warming up, compiling kernels",
               disable=not use_tqdm, dynamic_ncols=True) as bar):
        before = torch.cuda.memory_allocated()
        runner = make_runner(decoder, spec, small, attention_backend, quiet)
        small_cache = runner.kv.data.nbytes
        # Seats and buffers, to begin with.
        graphs = torch.cuda.memory_allocated() - before - small_cache
        engine = Engine(small, runner)
        warm_up(engine, bar.update)
        peak = torch.cuda.max_memory_allocated() - small_cache
        current = torch.cuda.memory_allocated() - small_cache
        if speedups.graphs and runner.fused and runner.attention.in_graphs:
            gc.collect()
            torch.cuda.empty_cache()  # what is cached would hide what the graphs take
            before = torch.cuda.mem_get_info()[0]
            runner.capture(use_tqdm=False, only_largest=True)
            graphs += max(0, before - torch.cuda.mem_get_info()[0])
        bar.update(bar.total - bar.n)
    del runner, engine
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    budget = MemoryBudget(total, utilization, total - free, peak, current, graphs, spec.block_bytes,
                          time.perf_counter() - start)
    if trace is not None:
        trace.emit("KV_BUDGET_ESTIMATE", **asdict(budget), num_blocks=budget.num_blocks)
    return budget
