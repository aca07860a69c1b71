"""Tokens a second, end to end: `python -m paged bench workload`.

The workload of nano-vllm's benchmark: 256 prompts of 100 to 1,024 random tokens, 100 to 1,024 generated tokens each,
temperature 0.6, end-of-sequence ignored, on Qwen3-0.6B shapes with random weights. Beside it: 1, 8 and 32 requests at
once, the time to the first token of a short prompt, how long decodes wait while long prompts arrive, and where the
time of a decode step goes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from paged.bench.common import QWEN3_0_6B, machine
from paged.llm import LLM
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.models.loader import Loaded
from paged.sampling import SamplingParams
from paged.startup import Speedups

VOCABULARY = 10_000                                         # token ids that prompts are drawn from
ABLATIONS = {"everything": {}, "no narrow products": {"narrow_products": False}, "in step": {"run_ahead": False},
             "no graphs": {"graphs": False}, "plain PyTorch kernels": {"fused": False}}


def random_model(config: ModelConfig, device: str, dtype: torch.dtype) -> Loaded:
    """Random weights, drawn on the device: what a benchmark needs of a model."""
    decoder = Decoder(config, device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for weight in decoder.parameters():
        weight.normal_(std=0.02, generator=generator)
    return Loaded(decoder, config, None, set(), 0)


def workload(num_requests: int = 256, low: int = 100, high: int = 1024) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts, and what each asks for."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, VOCABULARY) for _ in range(rng.randint(low, high))] for _ in range(num_requests)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(low, high))
                     for _ in range(num_requests)]


def with_other_first_tokens(prompts: list[list[int]], shift: int) -> list[list[int]]:
    """The same lengths, and nothing for the prefix cache to find."""
    return [[(prompt[0] + shift) % VOCABULARY] + prompt[1:] for prompt in prompts]


def tokens_per_second(llm: LLM, prompts, params, runs: int = 2) -> list[float]:
    """Output tokens a second of each run, after one warm-up run; every run begins its prompts differently."""
    rates = []
    for run in range(runs + 1):
        start = time.perf_counter()
        outputs = llm.generate(with_other_first_tokens(prompts, run), params, use_tqdm=False)
        seconds = time.perf_counter() - start
        rates.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    return rates[1:]


def steps_of_a_run(llm: LLM, prompts, params) -> list[tuple[int, int, float]]:
    """Every step of one run: its tokens, its requests, and the milliseconds until the engine was ready for the next."""
    engine, sizes, steps = llm.engine, [], []
    launch = engine._launch

    def noting(batch):
        sizes.append((len(batch.input_ids), len(batch.requests)))
        return launch(batch)

    engine._launch = noting
    try:
        for prompt, param in zip(with_other_first_tokens(prompts, 77), params):
            engine.add_request(prompt, param)
        last = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
            now = time.perf_counter()
            steps.append((*(sizes.pop() if sizes else (0, 0)), 1e3 * (now - last)))
            last = now
    finally:
        engine._launch = launch
    return steps


def at_once(llm: LLM, num_requests: int, num_tokens: int) -> dict:
    """num_requests 16-token prompts at once."""
    prompts = [[(17 * i + j) % VOCABULARY for j in range(16)] for i in range(num_requests)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)
    rates = tokens_per_second(llm, prompts, params, runs=5)
    return {"requests": num_requests, "tokens_per_s": rates, "step_ms": [1e3 * num_requests / rate for rate in rates]}


def time_to_first_token(llm: LLM, repetitions: int = 20) -> list[float]:
    """Milliseconds from a request's arrival to its first token: a 16-token prompt, an idle engine."""
    times = []
    for i in range(repetitions + 3):
        prompt = [(1000 + 31 * i + j) % VOCABULARY for j in range(16)]
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        times.append(1e3 * output.metrics.time_to_first_token)
    return times[3:]


def gaps_while_prompts_arrive(llm: LLM, num_decoding: int = 16, prompt: int = 2048) -> dict:
    """Milliseconds between the tokens of decoding requests, before and while two long prompts arrive."""
    engine = llm.engine
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(num_decoding):
        engine.add_request([(i * 13 + j) % VOCABULARY for j in range(64)], params)
    gaps, last, step = [], {}, 0
    while engine.has_unfinished():
        if step == 60:
            for i in range(2):
                engine.add_request([(i * 7 + 3 * j) % VOCABULARY for j in range(prompt)],
                                   SamplingParams(max_tokens=1, ignore_eos=True))
        for output in engine.step():
            if output.metrics.num_output_tokens and len(output.prompt_token_ids) == 64:
                now = time.perf_counter()
                if output.request_id in last:
                    gaps.append(1e3 * (now - last[output.request_id]))
                last[output.request_id] = now
        step += 1
    return {"decoding": num_decoding, "prompt_tokens": prompt, "longest_ms": max(gaps),
            "median_ms": statistics.median(gaps), "gaps_ms": gaps}


def step_split(llm: LLM, num_requests: int, context: int, steps: int = 20) -> dict:
    """Milliseconds a decode step spends in each kind of kernel, and between kernels, from PyTorch's profiler."""
    engine = llm.engine
    for i in range(num_requests):
        engine.add_request([(i * 11 + j) % VOCABULARY for j in range(context)],
                           SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200))
    while any(request.num_computed_tokens < request.num_prompt_tokens + 3 for request in
              engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - start) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.reset()
    split: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            split[_kind(event.name)] = split.get(_kind(event.name), 0) + event.device_time / 1e3 / steps
            entry = kernels.setdefault(event.name[:80], [0, 0])
            entry[0] += 1 / steps
            entry[1] += event.device_time / 1e3 / steps
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:14]
    return {"requests": num_requests, "context": context, "step_ms": wall, "kernels_ms": split,
            "top_kernels": [[name, *numbers] for name, numbers in top]}


def _kind(name: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    for kind, words in {"attention": ("_decode_kernel", "_combine_kernel", "_prefill_kernel", "flash", "fmha"),
                        "sampling": ("_best_of",), "copies": ("Memcpy", "Memset"),
                        "norm, rotary, store, activation": ("_add_rms_norm", "_rotate_and_store", "_silu_mul"),
                        "products": ("_narrow_product", "gemm", "gemv", "nvjet", "cutlass", "splitK", "cublas"),
                        }.items():
        if any(word in name for word in words):
            return kind
    return "other"


def main(argv: list[str] | None = None) -> int:
    """Measure, print a summary, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench workload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step (%(default)s)")
    parser.add_argument("--latency-budget", type=int, default=256,
                        help="tokens of a step where decodes must not wait (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="requests of the workload (%(default)s)")
    parser.add_argument("--ablations", action="store_true", help="also with each speed-up switched off")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    record = machine("python -m paged bench workload" + (" --ablations" if args.ablations else ""))
    on_gpu = args.device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    loaded = random_model(replace(QWEN3_0_6B, num_layers=args.layers), args.device, dtype)
    record |= {"model": f"Qwen3-0.6B shapes, {args.layers} layers, random weights", "dtype": str(dtype)[6:]}
    prompts, params = workload(args.requests)
    record["input_tokens"] = sum(map(len, prompts))
    record["output_tokens"] = sum(p.max_tokens for p in params)

    def engine(budget: int, **switched_off) -> LLM:
        start = time.perf_counter()
        llm = LLM(loaded, device=args.device, block_size=args.block_size, max_num_batched_tokens=budget,
                  max_model_len=4096, speedups=Speedups(**switched_off))
        record.setdefault("start_up_s", []).append(time.perf_counter() - start)
        return llm

    jobs = tqdm(total=8 + len(ABLATIONS) * args.ablations, desc="Measuring", dynamic_ncols=True)

    def done(name: str, value, summary: str) -> None:
        record[name] = value
        jobs.update()
        tqdm.write(f"{name:<28}{summary}")
        if args.output:                                    # after each part, so that nothing measured is lost
            args.output.write_text(json.dumps(record), encoding="utf-8")

    llm = engine(args.budget)
    if llm.budget is not None:
        record["budget"] = {**vars(llm.budget), "num_blocks": llm.budget.num_blocks}
    for n in (1, 8, 32):
        result = at_once(llm, n, 512)
        done(f"at_once_{n}", result, f"{result['tokens_per_s'][-1]:,.0f} tokens/s")
    result = time_to_first_token(llm)
    done("time_to_first_token_ms", result, f"{statistics.median(result):.2f} ms, median")
    rates = tokens_per_second(llm, prompts, params)
    done("workload_tokens_per_s", rates, ", ".join(f"{rate:,.0f} tokens/s" for rate in rates))
    steps = steps_of_a_run(llm, prompts, params)
    done("steps", steps, f"{len(steps)} steps, {sum(step[2] for step in steps) / 1e3:.2f} s")
    if on_gpu:
        splits = [step_split(llm, n, context) for n, context in ((1, 128), (32, 256), (128, 700), (256, 700))]
        done("step_split", splits, "\n".join(json.dumps(split) for split in splits))
    del llm
    llm = engine(args.latency_budget)
    result = gaps_while_prompts_arrive(llm)
    done("gaps", result, f"longest {result['longest_ms']:.2f} ms, median {result['median_ms']:.2f} ms")
    del llm
    if args.ablations:
        some, short = prompts[:args.requests // 2], SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=128)
        record["ablations"] = {}
        for name, switched_off in ABLATIONS.items():
            llm = engine(args.budget, **switched_off)
            entry = {"requests": len(some), "max_tokens": short.max_tokens,
                     "tokens_per_s": tokens_per_second(llm, some, short),
                     "one_tokens_per_s": at_once(llm, 1, 128)["tokens_per_s"]}
            record["ablations"][name] = entry
            del llm
            done("ablations", record["ablations"], f"{name}: {entry['tokens_per_s'][-1]:,.0f} tokens/s, one request "
                                                   f"{entry['one_tokens_per_s'][-1]:,.0f}")
    jobs.close()
    return 0
