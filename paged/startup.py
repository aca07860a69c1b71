"""Between loaded weights and the first request: warm-up, memory budget, one allocation, graphs.

The cache takes what is left of the card's share, so everything else must be known first. What a
step needs beside the weights shows only when a step runs: the warm-up runs the largest ones
    (max_num_batched_tokens, as prompts as long
as they may be; and every seat drawing through the filters) over a small cache, and captures the
largest graphs, before the pool is sized.

    total × utilization  │ weights │ others on the card │ activations of a step │ graphs │  K/V blocks …        │
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

from paged.engine import Engine, EngineConfig
from paged.kv_cache import PagedKVCache
from paged.memory import GiB, num_blocks_in_budget
from paged.models.decoder import Decoder
from paged.models.loader import enough_memory, free_memory
from paged.runner import ModelRunner
from paged.sampling import SamplingParams
from paged.slots import blocks_needed
from paged.trace import Trace

CPU_KV_BYTES = GiB
"""Memory that the cache takes on a CPU at most, where num_blocks does not say otherwise."""


@dataclass(frozen=True)
class Speedups:
    """What makes the GPU engine fast, each to be switched off on its own.

    Attributes:
        graphs: replay CUDA graphs, for every step of up to 16,384 tokens.
        fused: fused kernels, and all that a step needs kept on the GPU (without it nothing below
            applies).
        narrow_products: take steps of few tokens through products that carry all that lies between
            them.
        run_ahead: launch a step before the tokens of the one before are read.
    """

    graphs: bool = True
    fused: bool = True
    narrow_products: bool = True
    run_ahead: bool = True


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note how long what is inside takes."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def block_bytes(decoder: Decoder, block_size: int) -> int:
    """Bytes of one block of a model's cache, K and V, over all layers."""
    c = decoder.config
    return 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * decoder.embedding.element_size(
    )


def allocate_cache(decoder: Decoder, num_blocks: int, block_size: int,
                   on_host: bool = False) -> PagedKVCache:
    """The cache of a model, on its device or in host memory. Raises MemoryError, with the numbers,
    if it is too big."""
    c = decoder.config
    device = torch.device("cpu") if on_host else decoder.embedding.device
    try:
        return PagedKVCache(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim,
                            dtype=decoder.embedding.dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        size = num_blocks * block_bytes(decoder, block_size) / GiB
        raise MemoryError(
            f"a pool of {num_blocks} blocks of {block_size} tokens takes {size:.2f} GiB, and "
            f"{free_memory(device)}: lower num_blocks") from error


def make_runner(decoder: Decoder, config: EngineConfig, attention_backend: str = "auto",
                speedups: Speedups = Speedups(), use_tqdm: bool = True) -> ModelRunner:
    """The runner for a model on its device, with its cache: the fast one on a GPU, unless another
    attention backend than our own is asked for."""
    kv = allocate_cache(decoder, config.num_blocks, config.block_size)
    host_kv = None
    if config.preemption == "swap":
        host_kv = allocate_cache(decoder, config.num_host_blocks or config.num_blocks,
                                 config.block_size, on_host=True)
    if not (kv.data.is_cuda and speedups.fused and attention_backend in ("auto", "triton")):
        return ModelRunner(decoder, kv, attention_backend, host_kv)
    from paged.graph_runner import GraphRunner
    from paged.models.fused_decoder import NARROW
    with enough_memory(
            f"the {'graphs' if speedups.graphs else 'buffers'} of a step beside a pool of "
            f"{config.num_blocks} blocks ({kv.data.nbytes / GiB:.2f} GiB)",
            "Lower num_blocks, gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or do "
            "without graphs (enforce_eager)", kv.data.device):
        runner = GraphRunner(decoder, kv, config.max_num_seqs, config.max_model_len,
                             config.max_num_batched_tokens, host_kv, speedups.graphs,
                             NARROW if speedups.narrow_products else 0)
        runner.runs_ahead = speedups.run_ahead
        if speedups.graphs:
            runner.capture(use_tqdm)
    return runner


def cpu_num_blocks(decoder: Decoder, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks on a CPU: as many as could ever be in use, within CPU_KV_BYTES."""
    wanted = max_num_seqs * blocks_needed(max_model_len, block_size)
    return max(1, min(wanted, CPU_KV_BYTES // block_bytes(decoder, block_size)))


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


def largest_prompts(max_num_seqs: int, max_model_len: int,
                    max_num_batched_tokens: int) -> tuple[int, int]:
    """How many prompts of how many tokens fill a step, each as long as it may be."""
    length = min(max_model_len, max_num_batched_tokens)
    return min(max_num_seqs, max_num_batched_tokens // length), length


def warm_up(engine: Engine, after_each: Callable[[], object] = lambda: None) -> None:
    """Run the two steps that take most memory beside the weights, through an idle engine without
    prefix caching.

    The first computes as many tokens as a step may, as prompts as long as they may be. In the
    second every seat draws a token through filters and log-probabilities: float32 rows of the whole
    vocabulary, several times over.
    """
    c = engine.config
    for number, length, params in ((*largest_prompts(c.max_num_seqs, c.max_model_len,
                                                     c.max_num_batched_tokens),
                                    SamplingParams(max_tokens=1)), (c.max_num_seqs, 1,
                                                                    SamplingParams(
                                                                        max_tokens=1, top_p=0.5,
                                                                        logprobs=1))):
        for _ in range(number):
            engine.add_request([0] * length, params)
        while engine.has_unfinished():
            engine.step()
        after_each()


def measure_budget(decoder: Decoder, block_size: int, max_num_seqs: int, max_model_len: int,
                   max_num_batched_tokens: int, utilization: float, attention_backend: str = "auto",
                   speedups: Speedups = Speedups(), trace: Trace | None = None,
                   use_tqdm: bool = True) -> MemoryBudget:
    """Warm up with the largest steps and measure what they take; the kernels are compiled on the
    way.

    Raises MemoryError, with the numbers, when the card has no room for them.
    """
    start = time.perf_counter()
    number, length = largest_prompts(max_num_seqs, max_model_len, max_num_batched_tokens)
    num_blocks = max(number * blocks_needed(length, block_size), max_num_seqs)
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens,
                          max_model_len=max_model_len, enable_prefix_caching=False)
    quiet = replace(speedups, graphs=False, run_ahead=False)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with (enough_memory(f"a step of {max_num_batched_tokens} tokens",
                        "Lower max_num_batched_tokens or max_num_seqs, or free the card",
                        decoder.embedding.device),
          tqdm(total=2 + speedups.graphs, desc="Warming up, compiling kernels",
               disable=not use_tqdm, dynamic_ncols=True) as bar):
        before = torch.cuda.memory_allocated()
        runner = make_runner(decoder, config, attention_backend, quiet)
        small_cache = runner.kv.data.nbytes
        graphs = torch.cuda.memory_allocated(
        ) - before - small_cache  # tables and buffers, to begin with
        engine = Engine(config, runner)
        warm_up(engine, bar.update)
        peak = torch.cuda.max_memory_allocated() - small_cache
        current = torch.cuda.memory_allocated() - small_cache
        if speedups.graphs and hasattr(runner, "capture"):
            gc.collect()
            torch.cuda.empty_cache()  # what is cached would hide what the graphs take
            before = torch.cuda.mem_get_info()[0]
            runner.capture(use_tqdm=False, only_largest=True)
            graphs += max(0, before - torch.cuda.mem_get_info()[0])
        bar.update(bar.total - bar.n)
    del runner, engine
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    budget = MemoryBudget(total, utilization, total - free, peak, current, graphs,
                          block_bytes(decoder, block_size),
                          time.perf_counter() - start)
    if trace is not None:
        trace.emit("KV_BUDGET_ESTIMATE", **asdict(budget), num_blocks=budget.num_blocks)
    return budget
