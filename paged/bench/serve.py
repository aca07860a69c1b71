"""A server under a rising load of requests: `python -m paged bench serve`.

Any server of OpenAI's interface. Requests arrive as strangers do, at random and whether or not the
server keeps up (a Poisson process: an open loop), at each of the given rates for a while. Lengths
of prompts and answers are drawn from log-normal distributions, of which the median and sigma are
given: a few are long. Each answer is streamed, and what counts is what a user sees:

    throughput       tokens a second, of all answers together
    first token      seconds from the moment at which a request was due to arrive
    per token        mean seconds from one token of an answer to the next
    between          seconds from one piece of an answer to the next: all of them
    goodput          requests a second that kept the limits on the first two

Start the server first, with nothing else on the machine:

    python -m paged serve --quiet &
    python -m paged bench serve --rates 0.5,1,2 --seconds 30 --output load.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paged.bench.common import check_output, machine
from paged.checks import whole_number

WORDS = "the of and to in is that it was for on are as with his they at be this from have".split()
VOCABULARY = 10_000  # token ids that prompts are drawn from
TIMES = {  # name in a level: (title, factor, digits)
    "first_token_s": ("first token, s", 1, 2), "per_token_s": ("per token, ms", 1e3, 1),
    "between_s": ("between, ms", 1e3, 1)
}


@dataclass
class Sample:
    """One request; times in seconds since the level began, rounded to 0.1 ms.

    Attributes:
        due: when it was to arrive.
        prompt_tokens, output_tokens: as the server counted them; asked for, until then.
        pieces: when each piece of the answer came.
        status: of HTTP; 0 for what never answered, or broke off.
    """

    due: float
    prompt_tokens: int
    output_tokens: int
    pieces: list[float] = field(default_factory=list)
    status: int = 0

    @property
    def done(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == 200 and bool(self.pieces)

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.due

    @property
    def per_token(self) -> float | None:
        """Mean seconds a token after the first; None for one token."""
        if self.output_tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)

    def good(self, first_limit: float, token_limit: float) -> bool:
        """Whether it kept both limits, in seconds."""
        return self.done and self.first <= first_limit and (self.per_token or 0.0) <= token_limit


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process of `rate` a second; at least one."""
    times = [rng.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1] or [0.0]


def length(median: int, sigma: float, most: int, rng: random.Random) -> int:
    """Tokens, log-normally distributed, from 1 to `most`."""
    return max(1, min(most, round(median * rng.lognormvariate(0, sigma))))


def percentiles(values: Sequence[float], shares: Sequence[float] = (.5, .95, .99)) -> list[float]:
    """Of each share, the smallest value that as large a share does not exceed; none for none."""
    ordered = sorted(values)
    return [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in shares if ordered]


def summary(samples: Sequence[Sample], first_limit: float, token_limit: float) -> dict:
    """A level in a few numbers; rates are over the time from its beginning to the last piece."""
    done = [sample for sample in samples if sample.done]
    end = max((sample.pieces[-1] for sample in done), default=0.0)
    per_token = [sample.per_token for sample in done if sample.per_token is not None]
    between = [b - a for sample in done for a, b in zip(sample.pieces, sample.pieces[1:])]
    good = sum(sample.good(first_limit, token_limit) for sample in samples)
    return {
        "requests": len(samples), "done": len(done), "lost": len(samples) - len(done),
        "seconds": end, "tokens_per_s": sum(sample.output_tokens
                                            for sample in done) / end if end else 0.0,
        "goodput_per_s": good / end if end else 0.0, "first_token_s": percentiles([
            sample.first for sample in done
        ]), "per_token_s": percentiles(per_token), "between_s": percentiles(between)
    }


class Load:
    """Sends requests and notes what comes back."""

    def __init__(self, args: argparse.Namespace, model: str):
        import httpx
        self.args, self.model = args, model
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        self.client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(args.patience, pool=None), limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=100))

    def body(self, sample: Sample, rng: random.Random) -> dict:
        """What is asked."""
        if self.args.plain:
            prompt: object = " ".join(rng.choices(WORDS, k=sample.prompt_tokens))
        else:
            prompt = [rng.randrange(100, VOCABULARY) for _ in range(sample.prompt_tokens)]
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": sample.output_tokens,
            "temperature": 0.6, "seed": rng.randrange(2**31), "stream": True,
            "stream_options": {"include_usage": True}
        }
        return body if self.args.plain else body | {"ignore_eos": True}

    async def ask(self, sample: Sample, body: dict, start: float) -> None:
        """One request, when it is due."""
        import httpx
        await asyncio.sleep(start + sample.due - time.perf_counter())
        usage, ended = None, False
        try:
            async with self.client.stream("POST", self.args.url + "/completions",
                                          json=body) as answer:
                sample.status = answer.status_code
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or answer.status_code != 200:
                        continue
                    ended = line == "data: [DONE]"
                    chunk = {} if ended else json.loads(line[6:])
                    if "error" in chunk:
                        break
                    usage = chunk.get("usage") or usage
                    if chunk.get("choices"):
                        sample.pieces.append(round(time.perf_counter() - start, 4))
        except (httpx.HTTPError, ValueError):
            ended = False
        if sample.status == 200 and not ended:
            sample.status = 0
        if usage is not None:
            sample.prompt_tokens = usage["prompt_tokens"]
            sample.output_tokens = usage["completion_tokens"]

    async def level(self, rate: float, seed: int) -> dict:
        """All requests of a rate, to their end."""
        args, rng = self.args, random.Random(seed)
        samples = [
            Sample(round(due, 4), length(args.prompt_tokens, args.sigma, args.most_tokens, rng),
                   length(args.output_tokens, args.sigma, args.most_tokens, rng))
            for due in arrivals(rate, args.seconds, rng)
        ]
        bodies = [self.body(sample, rng) for sample in samples]
        own, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self.ask(sample, body, start)
                               for sample, body in zip(samples, bodies)))
        share = (time.process_time() - own) / (time.perf_counter() - start)
        return {
            "rate": rate,
            **summary(samples, args.first_limit, args.token_limit), "client_cpu_share": share,
            "samples": [asdict(sample) for sample in samples]
        }


async def measure(args: argparse.Namespace) -> dict:
    """All levels, one after the other; the record."""
    import httpx
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        found = httpx.get(args.url + "/models", headers=headers, timeout=30)
        found.raise_for_status()
        models = found.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ValueError(
            f"no server of OpenAI's interface answers at {args.url}: {error}") from None
    asked = ("prompt_tokens", "output_tokens", "sigma", "most_tokens", "seconds", "first_limit",
             "token_limit")
    command = f"python -m paged bench serve --rates {args.rates}" + "".join(
        f" --{name.replace('_', '-')} {getattr(args, name):g}" for name in asked)
    record = machine(command + " --plain" * args.plain) | {
        name: getattr(args, name)
        for name in (*asked, "plain", "conditions")
    } | {"model": models[0], "levels": []}
    load = Load(args, models[0]["id"])
    for _ in range(2):  # whatever a first request has to set up
        sample = Sample(0.0, args.prompt_tokens, args.output_tokens)
        await load.ask(sample, load.body(sample, random.Random(0)), time.perf_counter())
        if not sample.done:
            raise ValueError(f"a first request was answered with status {sample.status}: see what "
                             "the server says, and --plain")
    print(header())
    for seed, rate in enumerate(map(float, args.rates.split(",")), 1):
        level = await load.level(rate, seed)
        record["levels"].append(level)
        print(line_of(level), flush=True)
        if args.output:  # after each, so that nothing measured is lost
            args.output.write_text(json.dumps(record), encoding="utf-8")
    await load.client.aclose()
    return record


def header() -> str:
    """What stands above the lines of a table."""
    titles = "".join(f"{title:^21}" for title, _, _ in TIMES.values())
    names = f"{'rate':>6} {'done':>5} {'lost':>5} {'tokens/s':>9} {'good/s':>7}"
    return " " * len(names) + titles + "\n" + names + f"{'p50':>7}{'p95':>7}{'p99':>7}" * len(TIMES)


def line_of(level: dict) -> str:
    """A level as a line of the table."""
    times = "".join(f"{factor * value:7.{digits}f}" for name, (_, factor, digits) in TIMES.items()
                    for value in level[name])
    return (f"{level['rate']:6.2f} {level['done']:5} {level['lost']:5} "
            f"{level['tokens_per_s']:9.1f} {level['goodput_per_s']:7.2f}{times}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1",
                        help="of the interface (%(default)s)")
    parser.add_argument("--api-key", help="where the server wants one")
    parser.add_argument("--rates", default="0.5,1,2,4",
                        help="requests a second, one level each (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=30,
        help="that requests arrive, a level; the level ends with the last answer "
        "(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="median (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="median (%(default)s)")
    parser.add_argument("--sigma", type=float, default=0.5,
                        help="of the logarithms of lengths; 0 makes all alike (%(default)s)")
    parser.add_argument("--most-tokens", type=int, default=1024,
                        help="of a prompt, and of an answer (%(default)s)")
    parser.add_argument("--first-limit", type=float, default=1.0, metavar="SECONDS",
                        help="to the first token, for goodput (%(default)s)")
    parser.add_argument("--token-limit", type=float, default=0.1, metavar="SECONDS",
                        help="per token, for goodput (%(default)s)")
    parser.add_argument("--patience", type=float, default=300, metavar="SECONDS",
                        help="without a sign of the server, after which a request is lost")
    parser.add_argument(
        "--plain", action="store_true",
        help="ask only what every server knows: prompts of words, about one token "
        "each, and answers that may end early")
    parser.add_argument("--conditions", help="how the server was started: kept in the record")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "output_tokens", "most_tokens"):
        whole_number("--" + name.replace("_", "-"), getattr(args, name), least=1)
    for name in ("seconds", "first_limit", "token_limit", "patience"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be "
                             "above 0")
    if not args.sigma >= 0:
        raise ValueError(f"--sigma is {args.sigma}: it must be 0 or more")
    try:
        rates = [float(rate) for rate in args.rates.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--rates is {args.rates!r}: it must be numbers above 0, with commas")
    args.url = args.url.rstrip("/")
    check_output(args.output)
    asyncio.run(measure(args))
    return 0
