"""A fleet of replicas without a model, and the rules by which requests are sent to them: `python -m
paged bench fleet`.

Every replica is the real engine: scheduler, block pool, prefix cache. Only the model is missing;
what it would take is computed. Time is simulated, from one event to the next:

    a turn arrives   → a router picks a replica, which begins a step if it has none
    a step ends      → first tokens, answers; after a pause each answer's next turn arrives

A step takes a + b × its tokens + c × the context that they read. The three are fitted to the steps
that `bench workload` has measured, whose contexts are found by running the same requests through
the same scheduler again.
"""

from __future__ import annotations

import argparse
import base64
import heapq
import json
import os
import sys
import zlib
from array import array
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from paged.bench.conversations import Conversation, Load, conversations, system_prompts
from paged.bench.routing import ROUTERS, Router
from paged.checks import whole_number
from paged.engine import Engine, EngineConfig
from paged.request import RequestOutput
from paged.sampling import SamplingParams


class StepTime(NamedTuple):
    """Seconds of a step: `fixed`, `token` for each of its tokens and `context` for each token of
    context that one of its requests reads."""

    fixed: float
    token: float
    context: float

    def times(self, weights: float) -> StepTime:
        """Of a model of so many times the weights, with the same cache."""
        return self._replace(fixed=weights * self.fixed, token=weights * self.token)

    def seconds(self, num_tokens: int, num_context: int) -> float:
        """Of a step with so many tokens, whose requests have so much context."""
        return self.fixed + self.token * num_tokens + self.context * num_context


class Sizes:
    """A runner that computes nothing and keeps how large its last step was."""

    needs_lists = False

    def execute(self, batch) -> list[int]:
        """One token a request."""
        self.num_tokens, self.num_context = batch.query_start_loc[-1], sum(batch.seq_lens)
        self.samples = batch.samples
        return [7] * len(batch.request_ids)


class Served(NamedTuple):
    """What became of a turn: where and when it arrived, the seconds until its first token and its
    end, and tokens."""

    conversation: int
    turn: int
    replica: int
    arrival: float
    first_token: float
    end: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass
class Result:
    """A fleet after its load. Figures are of a part of the time: before it the fleet fills, after
    it nobody new comes.

    Attributes:
        served: every turn, in the order of arrival.
        start, stop: seconds of that part.
        busy, num_tokens: seconds that the replicas computed in it, and tokens of answers that came
            of it.
    """

    served: list[Served]
    start: float
    stop: float
    busy: float = 0.0
    num_tokens: int = 0

    @property
    def counted(self) -> list[Served]:
        """The turns that arrived in that part."""
        return [row for row in self.served if self.start <= row.arrival < self.stop]

    def figures(self) -> dict[str, float]:
        """Share of prompt tokens found in a cache, seconds to the first token, GPU seconds a
        token."""
        rows = self.counted
        waits = sorted(row.first_token for row in rows)
        return {
            "turns": len(rows),
            "hit_rate": sum(row.cached_tokens for row in rows) / sum(row.prompt_tokens
                                                                     for row in rows),
            "first_token_p50": waits[len(waits) // 2], "first_token_p99": waits[int(
                0.99 * len(waits))], "gpu_seconds_per_token": self.busy / self.num_tokens
        }


class Fleet:
    """Replicas, and what happens to them in time.

    Before the clock starts, each has served every system prompt, as after a long time.

    Args:
        load: who comes.
        rule: a name of ROUTERS.
        num_replicas, config: replicas, and the sizes of each.
        step_time: of all of them.
    """

    def __init__(self, load: Load, rule: str, num_replicas: int, config: EngineConfig,
                 step_time: StepTime):
        self.router: Router = ROUTERS[rule](num_replicas, config.num_blocks)
        self.engines = [Engine(config, Sizes()) for _ in range(num_replicas)]
        self.step_time = step_time
        self.result = Result([], load.seconds / 2, load.seconds)
        self._numbers = count()
        # What happens when: a conversation's next turn, or the end of a replica's step. The number
        # decides of what happens at once.
        self._events: list[tuple[float, int, Conversation | tuple[int, list[RequestOutput]]]] = []
        self._stepping = [False] * num_replicas
        self._under_way: dict[str, tuple[Conversation, int, float]] = {}
        self._first_token: dict[str, float] = {}
        for engine in self.engines:
            _warm(engine, system_prompts(load))
        for conversation in conversations(load, config.block_size):
            self._happens(conversation.arrival, conversation)

    def run(self) -> Result:
        """Until the last answer. The same arguments give the same result."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Conversation):
                self._arrive(event, now)
            else:
                self._end_step(*event, now)
        self.result.served.sort(key=lambda row: row.arrival)
        return self.result

    def _happens(self, when: float, event) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _arrive(self, conversation: Conversation, now: float) -> None:
        turn = conversation.ask()
        replica = self.router.send(conversation.hashes)
        name = f"{conversation.number} {conversation.said}"
        self.engines[replica].add_request(
            conversation.token_ids, SamplingParams(max_tokens=turn.answer_tokens, ignore_eos=True),
            name)
        self._under_way[name] = conversation, replica, now
        if not self._stepping[replica]:
            self._begin_step(replica, now)

    def _begin_step(self, replica: int, now: float) -> None:
        engine = self.engines[replica]
        outputs = engine.step()
        seconds = self.step_time.seconds(engine.runner.num_tokens, engine.runner.num_context)
        if self.result.start <= now < self.result.stop:
            self.result.busy += seconds
            self.result.num_tokens += sum(map(bool, engine.runner.samples))
        self._stepping[replica] = True
        self._happens(now + seconds, (replica, outputs))

    def _end_step(self, replica: int, outputs: list[RequestOutput], now: float) -> None:
        self._stepping[replica] = False
        for output in outputs:
            if output.metrics.num_output_tokens:
                self._first_token.setdefault(output.request_id, now)
            if output.finished:
                self._end_turn(output, now)
        if self.engines[replica].has_unfinished():
            self._begin_step(replica, now)

    def _end_turn(self, output: RequestOutput, now: float) -> None:
        conversation, replica, arrival = self._under_way.pop(output.request_id)
        answer = output.outputs[0].token_ids
        self.result.served.append(
            Served(conversation.number, conversation.said, replica, arrival,
                   self._first_token.pop(output.request_id) - arrival, now - arrival,
                   len(output.prompt_token_ids), output.num_cached_tokens, len(answer)))
        conversation.hear(answer)
        self.router.done(replica, conversation.hashes)
        if conversation.turns:
            self._happens(now + conversation.turns[0].pause, conversation)


def _warm(engine: Engine, prompts: list[list[int]]) -> None:
    """Serve them, the first one last."""
    for prompt in reversed(prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=1))
        while engine.has_unfinished():
            engine.step()


# ── how long a step takes ─────────────────────────────────────────────────────────────────────────


def step_time_of(record: dict) -> tuple[StepTime, float]:
    """Fitted to a record of `bench workload`, and the median of its relative errors.

    Raises ValueError if this scheduler does not make the steps that the record has.
    """
    import numpy as np

    from paged.bench.workload import with_other_first_tokens, workload
    sizes = Sizes()
    engine = Engine(
        EngineConfig(num_blocks=record["budget"]["num_blocks"], block_size=record["block_size"],
                     max_num_seqs=256, max_num_batched_tokens=record["max_num_batched_tokens"],
                     max_model_len=40_960), sizes)
    prompts, params = workload(high=record["longest"])
    for prompt, param in zip(with_other_first_tokens(prompts, 77), params):
        engine.add_request(prompt, param)
    rows, seconds = [], []
    for num_tokens, num_requests, ms in record["steps"]:
        if not num_tokens:  # the run's last step: it waits for the one before
            continue
        requests = len(engine.step())
        if (sizes.num_tokens, requests) != (num_tokens, num_requests):
            raise ValueError(f"step {len(rows)} of the record has {num_tokens} tokens of "
                             f"{num_requests} requests, and this scheduler makes it "
                             f"{sizes.num_tokens} of {requests}: take a newer record")
        rows.append([1, sizes.num_tokens, sizes.num_context])
        seconds.append(ms / 1e3)
    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(seconds), rcond=None)
    errors = np.abs(np.array(rows) @ found - seconds) / seconds
    return StepTime(*map(float, found)), float(np.median(errors))


# ── records ───────────────────────────────────────────────────────────────────────────────────────

COLUMNS = {"first_token": 1e-4, "cached_tokens": 1, "prompt_tokens": 1}
"""What is kept of every turn that counts, and in which unit."""


def packed(rows: Sequence[Served]) -> dict[str, str]:
    """The columns of a run's turns, each as whole numbers of its unit in 32 bits, compressed, in
    base64: a sample is two bytes or three."""
    found = {}
    for name, unit in COLUMNS.items():
        values = array("I", (round(getattr(row, name) / unit) for row in rows))
        if sys.byteorder == "big":
            values.byteswap()
        found[name] = base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()
    return found


def unpacked(samples: dict[str, str]) -> dict[str, list[float]]:
    """What `packed` was made of, in seconds and tokens."""
    found = {}
    for name, text in samples.items():
        values = array("I", zlib.decompress(base64.b64decode(text)))
        if sys.byteorder == "big":
            values.byteswap()
        found[name] = [value * COLUMNS[name] for value in values]
    return found


def _run(rule: str, rate: float, load: Load, *fleet) -> dict:
    """One row of the table, with its samples."""
    result = Fleet(load, rule, *fleet).run()
    return {"rule": rule, "rate": rate, **result.figures(), "samples": packed(result.counted)}


def _load_of(args: argparse.Namespace, rate: float) -> Load:
    return Load(rate * args.replicas, args.seconds, args.system_prompts, turns=args.turns,
                pause=args.pause, seed=args.seed)


def main(argv: list[str]) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m paged bench fleet", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 8, 12], metavar="RATE",
                        help="conversations a second for each replica (%(default)s)")
    parser.add_argument("--rules", nargs="+", choices=ROUTERS, default=list(ROUTERS),
                        metavar="RULE", help=f"of {', '.join(map(repr, ROUTERS))} (all)")
    for name, what in (("seconds", "for which conversations come; the second half counts"),
                       ("turns", "mean turns of a conversation"),
                       ("pause", "mean seconds between an answer and the next turn"),
                       ("system-prompts", "how many share them"), ("seed", "of the load")):
        default = getattr(Load(1), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(default), default=default,
                            help=f"{what} (%(default)s)")
    parser.add_argument("--num-blocks", type=int, default=4096,
                        help="blocks of a replica (%(default)s)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a block (%(default)s)")
    parser.add_argument(
        "--step-time", metavar="FILE",
        help="record of bench workload to which the time of a step is fitted (the book's)")
    parser.add_argument("--weights", type=float, default=10.0,
                        help="the model's, in those of the record's (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="processes that simulate (%(default)s)")
    parser.add_argument("--save", metavar="FILE", help="also save figures and samples, as JSON")
    args = parser.parse_args(argv)
    from paged.bench.common import check_output, machine
    from paged.lab.notebook import record
    check_output(args.save)
    for name in ("replicas", "jobs"):
        whole_number(f"--{name}", getattr(args, name), least=1)
    source = (json.loads(Path(args.step_time).read_text(
        encoding="utf-8")) if args.step_time else record("workload_h200"))
    step_time, error = step_time_of(source)
    step_time = step_time.times(args.weights)
    config = EngineConfig(num_blocks=args.num_blocks, block_size=args.block_size,
                          max_model_len=2 * Load(1).longest)
    print(f"a step: {1e3 * step_time.fixed:.2f} ms, {1e6 * step_time.token:.2f} us a token, "
          f"{1e9 * step_time.context:.1f} ns a token of context; median error {error:.1%}\n"
          f"{args.replicas} replicas of {args.num_blocks} blocks of {args.block_size} tokens\n\n"
          f"rate  rule             turns  hit rate  first token p50  p99 ms  GPU us a token")
    tasks = [(rule, rate, load, args.replicas, config, step_time)
             for rate, load in ((rate, _load_of(args, rate)) for rate in args.rates)
             for rule in args.rules]
    runs = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:  # a run takes a minute
        for found in pool.map(_run, *zip(*tasks)):
            print(
                f"{found['rate']:<5g} {found['rule']:<14} {found['turns']:>7,}"
                f"  {found['hit_rate']:>8.1%}  {1e3 * found['first_token_p50']:>15.1f}"
                f"  {1e3 * found['first_token_p99']:>6.1f}"
                f"  {1e6 * found['gpu_seconds_per_token']:>14.0f}", flush=True)
            runs.append(found)
    if args.save:
        head = machine(" ".join(["python -m paged bench fleet", *argv]))
        result_record = {
            **head, "replicas": args.replicas, "config": asdict(config), "load": asdict(
                _load_of(args, args.rates[0])), "weights": args.weights,
            "step_time": step_time._asdict(), "step_time_error": error, "step_time_source": {
                name: source[name]
                for name in ("command", "commit", "device", "model")
            }, "units": COLUMNS, "runs": runs
        }
        Path(args.save).write_text(json.dumps(result_record, indent=1) + "\n", encoding="utf-8")
