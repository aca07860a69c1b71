"""Cost of scheduling and block logic a step, without a model: `python -m paged bench scheduler`.

A runner that does nothing answers at once, so that a step is all Python: schedule, build the batch,
enter the tokens, fill and register blocks. Contexts of several lengths show whether the cost grows
with them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from pathlib import Path

from paged.engine import PREFIX_CACHES, Engine, EngineConfig
from paged.sampling import SamplingParams
from paged.slots import blocks_needed


class NoModel:
    """Answers every request with the same token. Reads no lists, as the model runner."""

    needs_lists = False

    def execute(self, batch) -> list[int]:
        """One token a request."""
        return [7] * len(batch.request_ids)


def decoding_engine(num_requests: int, context: int, steps: int, block_size: int = 16,
                    staggered: bool = True, **config) -> Engine:
    """An engine whose requests have just begun to decode at about this context.

    Args:
        staggered: contexts differ within a block, so that about as many blocks fill in every step;
            if not, all of them fill in the same step.
    """
    rng = random.Random(0)
    longest = context + block_size + steps
    engine = Engine(
        EngineConfig(num_blocks=num_requests * blocks_needed(longest, block_size),
                     block_size=block_size, max_num_seqs=num_requests, max_model_len=longest,
                     max_num_batched_tokens=num_requests * longest, **config), NoModel())
    for number in range(num_requests):
        length = context + number % block_size * staggered
        engine.add_request([number] + [rng.randrange(1000) for _ in range(length - 1)],
                           SamplingParams(max_tokens=steps, ignore_eos=True))
    engine.step()
    return engine


def step_times(engine: Engine, steps: int) -> list[float]:
    """Seconds of each of the next steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m paged bench scheduler",
                                     description="Milliseconds of Python a step, without a model.")
    parser.add_argument("--requests", type=int, default=256, help="running requests (%(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 4000],
                        help="tokens of a request (%(default)s)")
    parser.add_argument("--steps", type=int, default=200,
                        help="decode steps measured (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--prefix-cache", choices=PREFIX_CACHES, default="hash",
                        help="(%(default)s)")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--save", metavar="FILE", help="also save the raw samples, as JSON")
    args = parser.parse_args(argv)
    print(f"{args.requests} running requests, block size {args.block_size}, milliseconds a step")
    print(" context  blocks fill     median      99 %       max")
    records = []
    for context in args.contexts:
        for staggered in (True, False):
            engine = decoding_engine(args.requests, context, args.steps + 20, args.block_size,
                                     staggered, prefix_cache=args.prefix_cache)
            step_times(engine, 10)
            times = sorted(step_times(engine, args.steps))
            print(
                f"{context:8,}  {'in turn' if staggered else 'together':<11}"
                f"{1e3 * statistics.median(times):10.3f}{1e3 * times[int(0.99 * len(times))]:10.3f}"
                f"{1e3 * times[-1]:10.3f}")
            records.append({"context": context, "staggered": staggered, "seconds": times})
    if args.profile:
        engine = decoding_engine(args.requests, args.contexts[-1], args.steps + 20, args.block_size,
                                 prefix_cache=args.prefix_cache)
        profile = cProfile.Profile()
        profile.runcall(step_times, engine, args.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
    if args.save:
        from paged.bench.common import machine
        record = {
            **machine(" ".join(["python -m paged bench scheduler", *argv])), "requests": args.
            requests, "block_size": args.block_size, "prefix_cache": args.prefix_cache,
            "steps": records
        }
        Path(args.save).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
