"""Random traces against the oracle: a seed makes the pool, the policies, the requests and what
befalls them.

Every read is checked by `paged.lab.oracle`, every output is compared with the unbatched truth, the
engine's integrity is checked at every step, and the number of steps is bounded. A million of them:

    python -m tests.oracle --traces 1000000 --jobs 2

A failure prints the seed, what went wrong, and the smallest input found that still goes wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from paged.engine import Engine, EngineConfig
from paged.lab.oracle import VOCAB_SIZE, OracleRunner, RunAheadOracle, distribution, truth
from paged.sampling import BeamSearchParams, SamplingParams
from tests.beams import brute_force


class _Short:
    """A repr that names only what differs from the defaults."""

    def __repr__(self) -> str:
        values = (
            (field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        named = ", ".join(f"{f.name}={v!r}" for f, v in values if v != f.default)
        return f"{type(self).__name__}({named})"


@dataclass(frozen=True, repr=False)
class Arrival(_Short):
    """One request: when it comes, what it asks, and when its user gives up."""

    prompt: tuple[int, ...]
    max_tokens: int = 1
    step: int = 0
    n: int = 1
    beam_width: int | None = None  # None samples
    salt: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    abort_at: int | None = None  # a step; None waits for the end


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """An engine and everything that happens to it. Its repr is a reproducible input."""

    arrivals: tuple[Arrival, ...]
    num_blocks: int = 2
    block_size: int = 1
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 1
    prefix_cache: str = "off"  # off, hash, radix
    # Different hashes there are at most; None is the default function
    num_hashes: int | None = None
    preemption: str = "recompute"
    num_host_blocks: int | None = None
    run_ahead: bool = False
    failures: tuple[int, ...] = ()  # batches, counted from 1, at which the runner raises


class RunnerFailed(Exception):
    """Raised on purpose in the middle of a trace."""


def random_case(seed: int) -> Case:
    """The case of a seed. Small numbers are likelier than large ones: faults live in tight
    corners."""
    r = random.Random(seed)
    block_size, num_blocks = r.randint(1, 5), min(r.randint(2, 40), r.randint(2, 40))
    capacity, longest = num_blocks * block_size, r.randint(2, 24)
    alphabet = r.randint(1, VOCAB_SIZE)
    stems = [[r.randrange(alphabet) for _ in range(longest)] for _ in range(r.randint(1, 3))]
    salts = [None] if r.random() < 0.8 else [None, "a", "b"]
    most_copies, beams = r.choice([1, 1, 3]), r.choice([0, 0, 0.4])
    arrivals: list[Arrival] = []
    for step in sorted(r.randrange(r.choice([1, 12])) for _ in range(r.randint(1, 8))):
        earlier = r.choice(arrivals) if arrivals and r.random() < 0.5 else None
        if earlier is None:
            prompt = r.choice(stems)[:r.randint(1, longest)]
        elif r.random() < 0.5:  # the same prompt again
            prompt = list(earlier.prompt)
        else:  # the next turn of a conversation
            prompt = [*earlier.prompt, *truth(earlier.prompt, r.randint(1, earlier.max_tokens))]
        if r.random() < 0.6:
            prompt += [r.randrange(alphabet) for _ in range(r.randint(1, 3))]
        if r.random() < 0.95:  # else: perhaps too long, and refused
            prompt = prompt[:capacity]
        room = max(capacity - len(prompt) + 1, 1)
        beam_width = r.choice([1, 2, 2, 3]) if r.random() < beams else None
        arrivals.append(
            Arrival(tuple(prompt),
                    min(r.randint(1, 12), room) if r.random() < 0.95 else r.randint(1, 12), step,
                    r.randint(1, most_copies) if beam_width is None else 1, beam_width,
                    r.choice(salts), (r.randrange(VOCAB_SIZE),) if r.random() < 0.2 else (),
                    step + r.randint(0, 15) if r.random() < 0.15 else None))
    preemption = r.choice(["recompute", "swap"])
    return Case(tuple(arrivals), num_blocks, block_size, r.randint(3 if beams else most_copies, 8),
                min(r.randint(1, 30), r.randint(1, 30)), r.choice(["off", "hash", "hash", "radix"]),
                r.choice([None, None, 1, 3]), preemption,
                r.randint(1, num_blocks) if preemption == "swap" and r.random() < 0.5 else None,
                r.random() < 0.3,
                tuple(r.randint(1, 20) for _ in range(2)) if r.random() < 0.05 else ())


def servable(case: Case, arrival: Arrival) -> bool:
    """Whether the request can ever be served, by the rule of the documentation alone."""
    num_blocks = -(-(len(arrival.prompt) + arrival.max_tokens - 1) // case.block_size)
    return (num_blocks * (arrival.beam_width or 1) <= case.num_blocks
            and max(arrival.n, arrival.beam_width or 1) <= case.max_num_seqs)


def make_engine(case: Case) -> Engine:
    """The engine of a case, on an oracle."""
    config = EngineConfig(
        num_blocks=case.num_blocks, block_size=case.block_size, max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens, max_model_len=1000,
        enable_prefix_caching=case.prefix_cache != "off", preemption=case.preemption,
        prefix_cache="radix" if case.prefix_cache == "radix" else "hash",
        num_host_blocks=case.num_host_blocks)
    oracle = (RunAheadOracle if case.run_ahead else OracleRunner)(
        case.num_blocks, case.block_size, case.num_host_blocks or case.num_blocks)
    engine = Engine(config, oracle)
    limit_hashes(engine, case)
    return engine


def limit_hashes(engine: Engine, case: Case) -> None:
    """Few hashes, so that they collide, where the case says so."""
    if case.num_hashes is not None and case.prefix_cache == "hash":
        num_hashes = case.num_hashes
        assert engine.prefix_cache is not None
        engine.prefix_cache.hash_function = lambda parent, tokens: (parent or 0) + sum(
            tokens) % num_hashes


def run_case(case: Case) -> Counter:
    """Run a case to its end and count what happens; AssertionError at the first thing that is
    wrong."""
    engine, seen = make_engine(case), Counter()
    watch(engine, case, seen)
    outputs, step, busy_steps = {}, 0, 0
    allowed_steps = most_steps(case)
    while step <= max(
        (arrival.step for arrival in case.arrivals), default=0) or engine.has_unfinished():
        for index, arrival in enumerate(case.arrivals):
            if arrival.step == step:
                submit(engine, case, arrival, str(index), seen)
            if arrival.abort_at == step and engine.abort(str(index)):
                seen["aborts"] += 1
        engine.check_integrity()
        step += 1
        busy_steps += engine.has_unfinished()
        assert busy_steps <= allowed_steps, (
            f"{busy_steps} steps, and the work ends in {allowed_steps}")
        try:
            for output in engine.step():
                outputs[output.request_id] = output
        except RunnerFailed:
            seen["failures"] += 1
            limit_hashes(engine, case)  # the engine is a new one
        engine.check_integrity()
        engine.runner.check_names()
    assert engine.step() == [], "an idle engine has nothing to report"
    assert engine.block_pool.num_free() == case.num_blocks, "an idle engine holds blocks"
    if engine.scheduler.host_pool is not None:
        host_pool = engine.scheduler.host_pool
        assert host_pool.num_free() == host_pool.num_blocks, "an idle engine holds host blocks"
    for index, arrival in enumerate(case.arrivals):
        check_output(arrival, outputs.get(str(index)), servable(case, arrival))
    seen.update(traces=1, steps=step, preemptions=engine.scheduler.num_preemptions,
                cached_tokens=sum(output.num_cached_tokens for output in outputs.values()))
    return seen


def submit(engine: Engine, case: Case, arrival: Arrival, request_id: str, seen: Counter) -> None:
    """Add the request; one that cannot be served must be refused, and leave no trace."""
    params = SamplingParams(n=arrival.n, max_tokens=arrival.max_tokens,
                            stop_token_ids=arrival.stop_token_ids)
    if arrival.beam_width is not None:
        params = BeamSearchParams(beam_width=arrival.beam_width, max_tokens=arrival.max_tokens,
                                  stop_token_ids=arrival.stop_token_ids)
        seen["beam_searches"] += 1
    try:
        engine.add_request(arrival.prompt, params, request_id, arrival.salt)
    except ValueError:
        assert not servable(case, arrival), f"{arrival} was refused"
        seen["refusals"] += 1
    else:
        assert servable(case, arrival), f"{arrival} was accepted"


def check_output(arrival: Arrival, output, is_servable: bool) -> None:
    """Each completion must be what the request would have got alone, or the beginning of it if
    aborted."""
    if not is_servable or output is None:
        assert not is_servable or arrival.abort_at is not None, f"{arrival} never advanced"
        return
    assert output.finished, f"{arrival} never ended"
    if arrival.beam_width is not None:
        check_beams(arrival, output)
    for completion in output.outputs if arrival.beam_width is None else ():
        want = truth(arrival.prompt, arrival.max_tokens, completion.index, arrival.stop_token_ids)
        got = completion.token_ids
        if completion.finish_reason == "abort":
            assert arrival.abort_at is not None, f"{arrival} was aborted"
            assert got == want[:len(got)], f"{arrival}: got {got}, not {want}"
        else:
            reason = "stop" if want[-1] in arrival.stop_token_ids else "length"
            assert (got, completion.finish_reason) == (want,
                                                       reason), f"{arrival}: got {got}, not {want}"
    cached = output.num_cached_tokens
    assert 0 <= cached < len(
        arrival.prompt), f"{cached} of {len(arrival.prompt)} tokens from the cache"


def check_beams(arrival: Arrival, output) -> None:
    """The completions must be those of a brute-force search."""
    if output.outputs[0].finish_reason == "abort":
        assert arrival.abort_at is not None, f"{arrival} was aborted"
        return
    assert arrival.beam_width is not None
    best = brute_force(arrival.prompt, arrival.beam_width, arrival.max_tokens,
                       arrival.stop_token_ids, distribution)
    got = [completion.token_ids for completion in output.outputs]
    assert got == [tokens for tokens, _ in best], f"{arrival}: got {got}, not {best}"


def watch(engine: Engine, case: Case, seen: Counter) -> None:
    """Check each batch against the limits before it runs, count what is in it, and fail where told
    to."""
    run = engine.launch

    def checked(batch):
        seen["batches"] += 1
        assert len(
            batch.input_ids) <= case.max_num_batched_tokens, "the step is over its token budget"
        assert len(engine.scheduler.running) <= case.max_num_seqs, "more residents than seats"
        seen["copies"] += len(batch.block_copies)
        seen["swaps"] += len(batch.swap_in)
        scheduled = engine.scheduler.scheduled
        seen["chunks"] += sum(length < request.num_prompt_tokens
                              for length, request in zip(batch.seq_lens, scheduled))
        seen["mixed_steps"] += len({new > 1 for new in scheduled.values()}) == 2
        if seen["batches"] in case.failures:
            raise RunnerFailed
        return run(batch)

    engine.launch = checked


def most_steps(case: Case) -> int:
    """Steps in which all the work must be done: the oldest request advances by a token in each of
    them.

    A failed step costs it what it had; a step run ahead may find that there was nothing left to do;
    and a preempted beam may come back only to wait for the others.
    """
    lengths = [(len(arrival.prompt) + arrival.max_tokens) * max(arrival.n, 2 *
                                                                (arrival.beam_width or 0))
               for arrival in case.arrivals]
    steps = sum(lengths) + len(case.failures) * (1 + max(lengths, default=0))
    return 2 * steps if case.run_ahead else steps


# ── a smaller input that still fails ──────────────────────────────────────────────────────────────


def failure_of(case: Case) -> Exception | None:
    """What goes wrong in a case, or None."""
    try:
        run_case(case)
    except Exception as error:  # a crash is as good a find as a wrong read
        return error
    return None


def shrink(case: Case, fails: Callable[[Case], object] = failure_of) -> Case:
    """Take away from a failing case whatever can go while it still fails."""
    while smaller := next((candidate for candidate in _simpler(case) if fails(candidate)), None):
        case = smaller
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for index, arrival in enumerate(case.arrivals):
        rest = case.arrivals[:index], case.arrivals[index + 1:]
        yield replace(case, arrivals=rest[0] + rest[1])
        for change in _simpler_fields(arrival, Arrival((0,))):
            yield replace(case, arrivals=rest[0] + (change,) + rest[1])
    yield from _simpler_fields(case, Case(()))


def _simpler_fields(thing, simplest) -> Iterator:
    """The same thing with one field nearer to its simplest value."""
    for field in fields(thing):
        value, least = getattr(thing, field.name), getattr(simplest, field.name)
        if value == least or field.name == "arrivals":
            continue
        tries: list = [least]
        if isinstance(value, tuple):
            tries = [value[:len(value) // 2], value[1:], value[:-1], *_zeroed(value)]
            tries = [t for t in tries if len(t) >= len(least)]
        elif isinstance(value, int) and isinstance(least, int) and not isinstance(value, bool):
            tries = [least, (least + value) // 2, value - 1]
        for smaller in tries:
            if smaller != value:
                yield replace(thing, **{field.name: smaller})


def _zeroed(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for index, value in enumerate(values):
        if value:
            yield values[:index] + (0,) + values[index + 1:]


# ── many traces ───────────────────────────────────────────────────────────────────────────────────


def run_seeds(seeds: range) -> tuple[Counter, int | None]:
    """Run the cases of these seeds; returns what happened and the first seed that failed, or
    None."""
    seen = Counter()
    for seed in seeds:
        try:
            seen += run_case(random_case(seed))
        except Exception:
            return seen, seed
    return seen, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000, help="how many (default 10,000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first trace (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args()
    from tqdm import tqdm

    last = arguments.first + arguments.traces
    parts = [range(first, min(first + 200, last)) for first in range(arguments.first, last, 200)]
    seen, failed = Counter(), None
    with (multiprocessing.Pool(arguments.jobs) as
          workers, tqdm(total=arguments.traces, unit=" traces") as progress):
        for part, failed in workers.imap(run_seeds, parts):
            seen += part
            progress.update(part["traces"])
            if failed is not None:
                break
    print("  ".join(f"{name} {count:,}" for name, count in seen.items()))
    if failed is None:
        return 0
    case = random_case(failed)
    print(f"seed {failed}: {failure_of(case)!r}", file=sys.stderr)
    case = shrink(case)
    print(f"smallest input found: {case}\n{failure_of(case)!r}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
