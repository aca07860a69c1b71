"""Hit rate and cost of the prefix caches: `python -m paged bench prefix`, without a model.

Three shapes of load, served in turn by chained hashes and by a radix tree, in blocks of 16 tokens
and of one:

    system prompt     users who share one long instruction and differ after it
    conversation      each turn repeats all turns before it
    tree of thought   each node's prompt is its parent's, and a thought of its own
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paged.bench.scheduler import NoModel
from paged.engine import PREFIX_CACHES, Engine, EngineConfig
from paged.request import RequestOutput
from paged.sampling import SamplingParams

VOCABULARY = 50_000
Turn = Callable[[list[list[int]]],
                list[list[int]]]  # serves prompts that come together; their answers


def system_prompt(rng: random.Random, turn: Turn) -> None:
    """64 users after an instruction of 700 tokens."""
    system = _tokens(rng, 700)
    turn([system + _tokens(rng, rng.randint(20, 150)) for _ in range(64)])


def conversation(rng: random.Random, turn: Turn) -> None:
    """16 people talk for 8 turns; answers come from the engine, and are context in the next
    turn."""
    talks = [_tokens(rng, rng.randint(30, 90)) for _ in range(16)]
    for _ in range(8):
        talks = [
            talk + answer + _tokens(rng, rng.randint(10, 80))
            for talk, answer in zip(talks, turn(talks))
        ]


def tree_of_thought(rng: random.Random, turn: Turn) -> None:
    """A problem of 300 tokens, and four levels on which every node has three thoughts of about 40
    tokens."""
    level = [_tokens(rng, 300)]
    for _ in range(4):
        turn(level)
        level = [node + _tokens(rng, rng.randint(30, 50)) for node in level for _ in range(3)]
    turn(level)


LOADS = {
    "system prompt": system_prompt, "conversation": conversation, "tree of thought": tree_of_thought
}


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(n)]


class Stopwatch:
    """Counts the seconds spent in a cache's methods."""

    def __init__(self, cache):
        self.seconds = 0.0
        for name in ("match", "continues", "register", "forget", "root"):
            setattr(cache, name, self._timed(getattr(cache, name)))
        cache.pool.on_allocate = cache.forget

    def _timed(self, method):

        def timed(*arguments):
            start = time.perf_counter()
            result = method(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def measure(load: Callable, cache: str, block_size: int) -> dict:
    """Serve a load from a pool of 60,000 tokens, with answers of 24; returns its hit rate (share of
    prompt tokens found) and what the cache cost."""
    engine = Engine(
        EngineConfig(num_blocks=60_000 // block_size, block_size=block_size, max_model_len=8192,
                     prefix_cache=cache), NoModel())
    found = engine.prefix_cache
    assert found is not None, "an engine has a prefix cache unless its configuration says otherwise"
    watch = Stopwatch(found)
    served: list[RequestOutput] = []

    def turn(prompts: list[list[int]]) -> list[list[int]]:
        ids = [engine.add_request(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
        outputs = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
        served.extend(outputs[request_id] for request_id in ids)
        return [outputs[request_id].outputs[0].token_ids for request_id in ids]

    load(random.Random(0), turn)
    tokens = sum(len(output.prompt_token_ids) for output in served)
    return {
        "requests": len(served), "prompt_tokens": tokens,
        "hit_rate": sum(output.num_cached_tokens for output in served) / tokens,
        "seconds": watch.seconds, "cached_blocks": len(found)
    }


def measurements(block_sizes=(16, 1)) -> Iterator[dict]:
    """Every load on every cache, one dict each."""
    for name, load in LOADS.items():
        for block_size in block_sizes:
            for cache in PREFIX_CACHES:
                yield {
                    "load": name, "cache": cache, "block_size": block_size, **measure(
                        load, cache, block_size)
                }


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m paged bench prefix",
        description="Hit rate and cost of the two prefix caches on three loads.")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 1], help="(%(default)s)")
    parser.add_argument("--save", metavar="FILE", help="also save the figures, as JSON")
    args = parser.parse_args(argv)
    print("load             block  cache  requests  prompt tokens  hit rate  us a request  us a "
          "prompt token")
    rows = []
    for row in measurements(args.block_sizes):
        rows.append(row)
        print(f"{row['load']:<16} {row['block_size']:>5}  {row['cache']:<5}  {row['requests']:>8,}"
              f"  {row['prompt_tokens']:>13,}  {row['hit_rate']:>8.1%}"
              f"  {1e6 * row['seconds'] / row['requests']:>12,.0f}"
              f"  {1e6 * row['seconds'] / row['prompt_tokens']:>17.2f}")
    if args.save:
        from paged.bench.common import machine
        record = {
            **machine(" ".join(["python -m paged bench prefix", *argv])), "measurements": rows
        }
        Path(args.save).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
