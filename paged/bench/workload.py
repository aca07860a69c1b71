"""Tokens a second, end to end: `python -m paged bench workload`.

The workload of nano-vllm's benchmark: 256 prompts of 100 to 1,024 random tokens, 100 to 1,024
generated tokens each, temperature 0.6, end-of-sequence ignored, on Qwen3-0.6B shapes with random
weights. Beside it: 1, 8 and 32 requests at once, the time to the first token of a short prompt, how
long decodes wait while long prompts arrive, and, on a GPU, where the time of a decode step goes. On
a CPU the defaults are smaller, and with --layers 2 it takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from paged.bench.common import QWEN3_0_6B, VOCABULARY, check_output, machine
from paged.bench.steps import step_split
from paged.checks import whole_number
from paged.config import Speedups
from paged.device import use_device
from paged.llm import LLM
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.models.loader import Loaded, room_for_weights
from paged.owner import short_collections
from paged.parallel.shard import Part
from paged.sampling import SamplingParams

ABLATIONS = {
    "everything": {}, "no narrow products": {"narrow_products": False},
    "in step": {"run_ahead": False}, "no graphs": {"graphs": False},
    "plain PyTorch kernels": {"fused": False}
}
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {}, "top-p and top-k": {"top_p": 0.95, "top_k": 50}, "top-p": {"top_p": 0.95},
    "min-p": {"min_p": 0.05}, "repetition penalty": {"repetition_penalty": 1.1}
}


def random_model(config: ModelConfig, device: str | torch.device, dtype: torch.dtype,
                 use_tqdm: bool = False, max_model_len: int | None = None, rank: int = 0,
                 num_ranks: int = 1) -> Loaded:
    """Random weights, drawn on the device: what a benchmark needs of a model, or of a rank's part.

    What follows the config is as for `loader.load`; bars and max_model_len change nothing.
    """
    part = None if num_ranks == 1 else Part(config, rank, num_ranks)
    held = config if part is None else part.config
    with room_for_weights(held, torch.device(device), dtype):
        decoder = Decoder(held, device, dtype, part)
    generator = torch.Generator(device).manual_seed(0)
    for weight in decoder.parameters():
        weight.normal_(std=0.02, generator=generator)
    return Loaded(decoder, config, None, set(), 0)


def workload(num_requests: int = 256, low: int = 100,
             high: int = 1024) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts, and what each asks for."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, VOCABULARY) for _ in range(rng.randint(low, high))]
               for _ in range(num_requests)]
    return prompts, [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(low, high))
        for _ in range(num_requests)
    ]


def with_other_first_tokens(prompts: list[list[int]], shift: int) -> list[list[int]]:
    """The same lengths, and nothing for the prefix cache to find."""
    return [[(prompt[0] + shift) % VOCABULARY] + prompt[1:] for prompt in prompts]


def tokens_per_second(llm: LLM, prompts, params, runs: int = 2, first: int = 0) -> list[float]:
    """Output tokens a second of each run after a warm-up; each shifts the prompts, from `first`."""
    rates = []
    for run in range(first, first + runs + 1):
        fresh = with_other_first_tokens(prompts, run)
        start = time.perf_counter()
        outputs = llm.generate(fresh, params, use_tqdm=False)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(num_tokens / (time.perf_counter() - start))
    return rates[1:]


def steps_of_a_run(llm: LLM, prompts, params) -> list[tuple[int, int, float]]:
    """Every step of one run: its tokens, its requests, and the milliseconds until the engine was
    ready for the next."""
    engine, sizes, steps = llm.engine, [], []
    launch = engine.launch

    def noting(batch):
        sizes.append((len(batch.input_ids), len(batch.request_ids)))
        return launch(batch)

    engine.launch = noting
    try:
        for prompt, param in zip(with_other_first_tokens(prompts, 77), params):
            engine.add_request(prompt, param)
        with short_collections():
            last = time.perf_counter()
            while engine.has_unfinished():
                engine.step()
                now = time.perf_counter()
                steps.append((*(sizes.pop() if sizes else (0, 0)), 1e3 * (now - last)))
                last = now
    finally:
        engine.launch = launch
    return steps


def at_once(llm: LLM, num_requests: int, num_tokens: int) -> dict:
    """num_requests 16-token prompts at once."""
    prompts = [[(17 * i + j) % VOCABULARY for j in range(16)] for i in range(num_requests)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)
    rates = tokens_per_second(llm, prompts, params, runs=5)
    return {
        "requests": num_requests, "tokens_per_s": rates,
        "step_ms": [1e3 * num_requests / rate for rate in rates]
    }


def time_to_first_token(llm: LLM, repetitions: int = 20) -> list[float]:
    """Milliseconds from a request's arrival to its first token: a 16-token prompt, an idle
    engine."""
    times = []
    for i in range(repetitions + 3):
        prompt = [(1000 + 31 * i + j) % VOCABULARY for j in range(16)]
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True),
                                 use_tqdm=False)
        first = output.metrics.time_to_first_token
        assert first is not None, "the request ended with two tokens"
        times.append(1e3 * first)
    return times[3:]


def gaps_while_prompts_arrive(llm: LLM, num_decoding: int = 16, prompt: int = 2048) -> dict:
    """Milliseconds between the tokens of decoding requests, before and while two long prompts
    arrive."""
    engine = llm.engine
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(num_decoding):
        engine.add_request([(i * 13 + j) % VOCABULARY for j in range(64)], params)
    gaps, last, step = [], {}, 0
    with short_collections():
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
    return {
        "decoding": num_decoding, "prompt_tokens": prompt, "longest_ms": max(gaps),
        "median_ms": statistics.median(gaps), "gaps_ms": gaps
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print a summary, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench workload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, cuda:1 and so on, or auto (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--budget", type=int, default=16384,
                        help="tokens of a step (%(default)s, as in nano-vllm's benchmark)")
    parser.add_argument("--latency-budget", type=int, default=128,
                        help="tokens of a step where decodes must not wait (%(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="RANKS",
                        help="GPUs that share the model, or processes on a CPU (%(default)s)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (%(default)s)")
    parser.add_argument("--requests", type=int, help="requests of the workload (256; on a CPU 4)")
    parser.add_argument("--longest", type=int,
                        help="tokens of its longest prompts and answers (1024; on a CPU 64)")
    parser.add_argument("--tokens", type=int,
                        help="tokens of each of 1, 8 and 32 requests at once (512; on a CPU 8)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of K and V (%(default)s)")
    parser.add_argument("--persistent", action="store_true",
                        help="decode steps of up to 32 requests in one kernel")
    parser.add_argument("--ablations", action="store_true",
                        help="also with each speed-up switched off")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    device = use_device(args.device)
    on_gpu = device.type == "cuda"
    for name, defaults in dict(requests=(4, 256), longest=(64, 1024), tokens=(8, 512)).items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[on_gpu])
    for name in ("block_size", "budget", "latency_budget", "layers", "requests", "longest",
                 "tokens", "tensor_parallel_size"):
        whole_number("--" + name.replace("_", "-"), getattr(args, name), least=1)
    if args.persistent and args.ablations:
        raise ValueError("--ablations switches off what --persistent is made of: run one, then the "
                         "other")
    check_output(args.output)
    ranks = args.tensor_parallel_size
    record = machine(
        "python -m paged bench workload" + (" --ablations" if args.ablations else "")
        + ("" if args.block_size == 16 else f" --block-size {args.block_size}")
        + (f" --tensor-parallel-size {ranks}" if ranks > 1 else "")
        + (" --persistent" if args.persistent else "")
        + ("" if args.kv_cache_dtype == "auto" else f" --kv-cache-dtype {args.kv_cache_dtype}"))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = replace(QWEN3_0_6B, num_layers=args.layers)
    model: Any = (
        partial(random_model, shapes) if ranks > 1 else  # each rank draws its own part
        random_model(shapes, device, dtype))
    record |= {
        "model": f"Qwen3-0.6B shapes, {args.layers} layers, random weights",
        "dtype": str(dtype)[6:], "longest": args.longest, "at_once_tokens": args.tokens,
        "block_size": args.block_size, "max_num_batched_tokens": args.budget,
        "latency_budget": args.latency_budget, "tensor_parallel_size": ranks,
        "kv_cache_dtype": args.kv_cache_dtype, "persistent": args.persistent
    }
    prompts, params = workload(args.requests, min(100, (args.longest + 3) // 4), args.longest)
    record["input_tokens"] = sum(map(len, prompts))
    record["output_tokens"] = sum(p.max_tokens for p in params)

    def engine(budget: int, **switched_off) -> LLM:
        start = time.perf_counter()
        llm = LLM(model, args.device, dtype,
                  block_size=args.block_size, max_num_batched_tokens=budget, max_model_len=max(
                      4096, 2 * args.longest + 200), speedups=Speedups(
                          persistent=args.persistent, **switched_off), tensor_parallel_size=ranks,
                  kv_cache_dtype=args.kv_cache_dtype)
        record.setdefault("start_up_s", []).append(time.perf_counter() - start)
        record.setdefault("start_up_phases_s", []).append(llm.start_up)
        return llm

    jobs = tqdm(total=8 + on_gpu + len(ABLATIONS) * args.ablations, desc="Measuring",
                dynamic_ncols=True)

    def done(name: str, value, summary: str) -> None:
        record[name] = value
        jobs.update()
        tqdm.write(f"{name:<28}{summary}")
        if args.output:  # after each part, so that nothing measured is lost
            args.output.write_text(json.dumps(record), encoding="utf-8")

    llm = engine(args.budget)
    if llm.budget is not None:
        record["budget"] = {**vars(llm.budget), "num_blocks": llm.budget.num_blocks}
    for n in (1, 8, 32):
        result = at_once(llm, n, args.tokens)
        done(f"at_once_{n}", result, f"{result['tokens_per_s'][-1]:,.0f} tokens/s")
    times = time_to_first_token(llm)
    done("time_to_first_token_ms", times, f"{statistics.median(times):.2f} ms, median")
    rates = tokens_per_second(llm, prompts, params, runs=5 if on_gpu else 2)
    done("workload_tokens_per_s", rates, ", ".join(f"{rate:,.0f} tokens/s" for rate in rates))
    some = prompts[:max(1, args.requests // 2)]
    filters = {}
    for number, (name, more) in enumerate(FILTERS.items(), 1):
        asked = [replace(p, **more) for p in params[:len(some)]]
        filters[name] = tokens_per_second(llm, some, asked, first=100 * number)
    done("filters", filters,
         ", ".join(f"{name} {rates[-1]:,.0f}" for name, rates in filters.items()))
    steps = steps_of_a_run(llm, prompts, params)
    done("steps", steps, f"{len(steps)} steps, {sum(step[2] for step in steps) / 1e3:.2f} s")
    if on_gpu:
        splits = [
            step_split(llm, n, context)
            for n, context in ((1, 128), (32, 256), (128, 700), (256, 700))
        ]
        done("step_split", splits, "\n".join(json.dumps(split) for split in splits))
    llm.close()
    llm = engine(args.latency_budget)
    result = gaps_while_prompts_arrive(llm, prompt=2 * args.longest)
    done("gaps", result,
         f"longest {result['longest_ms']:.2f} ms, median {result['median_ms']:.2f} ms")
    llm.close()
    if args.ablations:
        short = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=min(128, args.tokens))
        record["ablations"] = {}
        for name, switched_off in ABLATIONS.items():
            llm = engine(args.budget, **switched_off)
            entry = {
                "requests": len(some), "max_tokens": short.max_tokens,
                "tokens_per_s": tokens_per_second(llm, some, short), "one_tokens_per_s": at_once(
                    llm, 1, short.max_tokens)["tokens_per_s"]
            }
            record["ablations"][name] = entry
            llm.close()
            done(
                "ablations", record["ablations"],
                f"{name}: {entry['tokens_per_s'][-1]:,.0f} tokens/s, one request "
                f"{entry['one_tokens_per_s'][-1]:,.0f}")
    jobs.close()
    return 0
