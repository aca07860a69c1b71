"""Where the time of a decode step goes: in the parts of the engine, and in kinds of kernels."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from paged.bench.common import VOCABULARY
from paged.engine import Engine
from paged.llm import LLM
from paged.sampling import SamplingParams


def step_split(llm: LLM, num_requests: int, context: int, steps: int = 20) -> dict:
    """Milliseconds of a decode step: as the clock sees it, in the parts of the engine on the CPU,
    and in kernels.

    Kernels come from PyTorch's profiler, in steps of their own (`kernel_split`); the clock runs
    without it.
    """
    engine = llm.engine
    for i in range(num_requests):
        engine.add_request([(i * 11 + j) % VOCABULARY for j in range(context)],
                           SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200))
    while any(request.num_computed_tokens < request.num_prompt_tokens + 3
              for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    clock = clock_split(engine, steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.reset()
    return {
        "requests": num_requests, "context": context, **clock, **kernel_split(
            profile.events(), steps)
    }


def clock_split(engine: Engine, steps: int) -> dict:
    """Milliseconds of a step, and of it in the parts of the engine.

    `collect` is mostly waiting for the GPU; the others are work of the CPU. It runs a step ahead:
    while it schedules and launches one step, the GPU is at the one before, so that CPU and kernels
    do not add up.
    """
    parts = {
        "schedule": (engine.scheduler, "schedule"), "launch": (engine, "launch"),
        "collect": (engine, "collect"), "update": (engine, "_update")
    }
    originals = {name: getattr(*place) for name, place in parts.items()}
    seconds = dict.fromkeys(parts, 0.0)

    def timing(name):

        def call(*args):
            start = time.perf_counter()
            result = originals[name](*args)
            seconds[name] += time.perf_counter() - start
            return result

        return call

    for name, place in parts.items():
        setattr(*place, timing(name))
    try:
        _wait_for_gpu()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        _wait_for_gpu()
        wall = time.perf_counter() - start
    finally:
        for name, place in parts.items():
            setattr(*place, originals[name])
    return {
        "step_ms": 1e3 * wall / steps,
        "cpu_ms": {name: 1e3 * part / steps
                   for name, part in seconds.items()}
    }


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernel_split(events: Iterable, steps: int) -> dict:
    """Milliseconds a step in each kind of kernel, from the events of a profile of so many steps.

    A kernel may start while the one before it still runs, and wait: `kernels_ms` adds up what each
    lasted, and may exceed the step. In `busy_ms` every instant counts once, for the kernel that
    began first, so that the sum is the time the GPU was busy; `profiled_ms` is the time from the
    first kernel to the end of the last.
    """
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in events
                     if event.device_type == torch.autograd.DeviceType.CUDA)
    lasted: dict[str, float] = {}
    busy: dict[str, float] = {}
    by_name: dict[str, list[float]] = {}
    reached = 0.0  # microseconds, as all times of the profiler
    for start, end, name in kernels:
        kind, ms = _kind(name), (end - start) / 1e3 / steps
        lasted[kind] = lasted.get(kind, 0) + ms
        busy[kind] = busy.get(kind, 0) + max(0.0, end - max(start, reached)) / 1e3 / steps
        reached = max(reached, end)
        entry = by_name.setdefault(name[:80], [0, 0])
        entry[0] += 1 / steps
        entry[1] += ms
    top = sorted(by_name.items(), key=lambda item: -item[1][1])[:14]
    return {
        "kernels_ms": lasted, "busy_ms": busy,
        "profiled_ms": (reached - kernels[0][0]) / 1e3 / steps,
        "top_kernels": [[name, *numbers] for name, numbers in top]
    }


def _kind(name: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    for kind, words in {
            "attention": ("_decode_kernel", "_prefill_kernel", "flash", "Flash", "fmha"),
            "sampling": ("_weigh_kernel", "_cut_kernel", "_draw_kernel"),
            "copies": ("Memcpy", "Memset"),
            "norm, rotary, store, activation": ("norm", "_store_kernel", "_silu_mul"),
            "products": ("_product_kernel", "_qkv_kernel", "gemm", "gemv", "nvjet", "cutlass",
                         "splitK", "cublas"),
    }.items():
        if any(word in name for word in words):
            return kind
    return "other"
