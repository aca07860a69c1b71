"""The command line: python -m paged batch requests.jsonl -o results.jsonl."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from paged.checks import whole_number
from paged.offline.replicas import Replicas, start_ray
from paged.offline.requests import Line, read_requests
from paged.offline.results import Results
from paged.offline.run import answer_all, answer_line
from paged.options import add_model_options, llm_arguments, load

DESCRIPTION = """\
Answer every request of a file, and write the results into another as they come.

A request is a line in OpenAI's batch format:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}}

A result is a line {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"},
the body being what a server would answer. A line that is no request, or that the model can never
serve, has its error there, and the others go on.

However a run ends, the same command goes on where it stopped.
"""


def add_command(commands) -> None:
    """Add `batch` to the subcommands of the command line."""
    parser = commands.add_parser("batch", help="answer the requests of a file",
                                 description=DESCRIPTION,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", help="file of requests, in JSON lines")
    parser.add_argument("-o", "--output", required=True, metavar="FILE",
                        help="file of results; one that is there is continued")
    parser.add_argument("--served-model-name", metavar="NAME",
                        help="the model's name in bodies (what --model says)")
    parser.add_argument(
        "--in-flight", type=int, metavar="REQUESTS",
        help="lines that are with an engine at once (twice --max-num-seqs: as many wait as run)")
    parser.add_argument(
        "--ray", action="store_true",
        help="answer on a Ray cluster: that of RAY_ADDRESS or of this machine, else a new one "
        "here")
    parser.add_argument("--replicas", type=int, metavar="ENGINES",
                        help="engines on the cluster (as many as its GPUs are enough for)")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Answer what has no answer yet."""
    in_flight = 2 * args.max_num_seqs if args.in_flight is None else args.in_flight
    whole_number("--in-flight", in_flight, least=1)
    if args.replicas is not None:
        whole_number("--replicas", args.replicas, least=1)
        if not args.ray:
            raise ValueError("--replicas are on a Ray cluster: add --ray")
    name = args.served_model_name or Path(args.model).name
    try:
        import paged.server.asked  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: install what answers in OpenAI's form need with "
                          f"pip install 'paged[serve]'") from None
    Path(args.requests).stat()  # raises OSError before a file of results is made
    with Results(args.output) as results:
        total, done = results.check(read_requests(args.requests))
        if done < total:
            with closing(read_requests(args.requests)) as lines, _Progress(
                    args, results, total, done) as progress:
                left = (line for line in lines if not results.has(line))
                answer = _answer_on_ray if args.ray else _answer_here
                asyncio.run(answer(args, name, left, progress, in_flight))
    print(f"{total} results in {args.output}, {total - done} of them new", file=sys.stderr)


async def _answer_here(args, name: str, lines: Iterator[Line], progress: _Progress,
                       in_flight: int) -> None:
    from paged.async_llm import AsyncLLM
    async with AsyncLLM(load(args)) as llm:
        progress.start()
        await answer_all(lines, lambda line: answer_line(llm, name, line), progress.write,
                         in_flight)


async def _answer_on_ray(args, name: str, lines: Iterator[Line], progress: _Progress,
                         in_flight: int) -> None:
    replicas = Replicas(start_ray(), args.replicas, in_flight, args.model, name,
                        llm_arguments(args) | {"use_tqdm": False})
    progress.start()
    await replicas.run(answer_all(lines, replicas.answer, progress.write, replicas.num_places))
    if replicas.num_lost:
        print(f"workers were lost: {replicas.num_lost} times a line was given to another one",
              file=sys.stderr)


class _Progress:
    """A bar, and what it says; a context that says at an early end how to go on."""

    def __init__(self, args, results: Results, total: int, done: int):
        self.results, self.num_tokens, self.num_errors = results, 0, 0
        self.bar = tqdm(disable=True)
        self._options = dict(total=total, initial=done, desc="Requests", disable=args.quiet,
                             dynamic_ncols=True)

    def start(self) -> None:
        """From now on time counts."""
        self.bar, self._started = tqdm(**self._options), time.perf_counter()

    def write(self, result: dict) -> None:
        """Keep a result, and show that it is there."""
        self.results.write(result)
        response = result["response"] or {"status_code": 0}
        if response["status_code"] == 200:
            self.num_tokens += response["body"]["usage"]["completion_tokens"]
        else:
            self.num_errors += 1
        rate = self.num_tokens / (time.perf_counter() - self._started)
        self.bar.set_postfix_str(
            f"{self.num_tokens} tokens, {rate:.0f}/s, {self.num_errors} errors", refresh=False)
        self.bar.update()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind, *exception) -> None:
        self.bar.close()
        if kind is not None:
            print(f"the same command goes on from here: {self.results.path} keeps what is done",
                  file=sys.stderr)
