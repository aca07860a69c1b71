"""python -m paged serve: the process around the server, and its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.llm import LLM
    from paged.server.app import Server

DESCRIPTION = """\
Serve a model over HTTP to clients of OpenAI's interface: /v1/chat/completions, /v1/completions,
/v1/models, /health, /metrics for Prometheus, and a page to chat at /. With --theatre, a page at
/theatre shows what the engine has done in its last steps.

Ctrl-C or SIGTERM finishes what runs, refuses what comes, and ends; a second one ends at once.
"""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def add_command(commands, add_engine_options, open_llm) -> None:
    """Add `serve` to the subcommands of the command line."""
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP, to clients of OpenAI's interface",
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen at; 0.0.0.0 is all of this machine's (%(default)s: "
        "nobody from outside)")
    parser.add_argument("--port", type=int, default=8000,
                        help="0 takes one that is free (%(default)s)")
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", dest="api_keys",
        help="let in who brings this key; for several keys, several times. Better in "
        "PAGED_API_KEY, separated by commas: a command line can be read by others")
    parser.add_argument(
        "--share-prefixes", action="store_true",
        help="let the holders of different keys share cached prefixes: faster where they ask "
        "alike, and each can find out what others have asked")
    parser.add_argument("--served-model-name", metavar="NAME",
                        help="the model's name to clients (what --model says)")
    parser.add_argument(
        "--max-requests", type=int, metavar="REQUESTS",
        help="running and waiting at once; who comes then gets a 429 (twice --max-num-seqs)")
    parser.add_argument("--grace-period", type=float, default=30, metavar="SECONDS",
                        help="what runs may take to end after a SIGTERM (%(default)s)")
    parser.add_argument("--log-prompts", action="store_true",
                        help="write prompts and answers into the log")
    parser.add_argument(
        "--theatre", action="store_true",
        help="record the engine's last steps and show them at /theatre, block by block. Who can "
        "open it sees everybody's prompts and answers. It makes steps slower, and wants a small "
        "pool: see --num-blocks")
    add_engine_options(parser)
    parser.set_defaults(run=lambda args: run(args, open_llm))


def run(args, open_llm) -> None:
    """Serve until a signal ends it."""
    try:
        import uvicorn  # noqa: F401

        import paged.server.app  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: install what serving needs with "
                          "pip install 'paged[serve]'") from None
    from paged.checks import whole_number
    if args.max_requests is not None:
        whole_number("--max-requests", args.max_requests, least=1)
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port is {args.port}: it must be from 0 to 65535")
    keys = (args.api_keys or []) + os.environ.get("PAGED_API_KEY", "").split(",")
    keys = [key.strip() for key in keys if key.strip()]
    with open_llm(args) as llm:
        asyncio.run(serve(args, llm, keys))


async def serve(args, llm: LLM, keys: list[str]) -> None:
    """Answer requests until a signal comes, and then until what runs has ended."""
    import uvicorn

    from paged.async_llm import AsyncLLM
    from paged.server.app import make_server

    logging.basicConfig(level=logging.WARNING if args.quiet else logging.INFO,
                        format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    name, local = args.served_model_name or Path(args.model).name, args.host in LOCAL_HOSTS
    server = make_server(AsyncLLM(llm), name, keys, args.share_prefixes, args.max_requests,
                         local_only=local and not keys, log_prompts=args.log_prompts,
                         theatre=args.theatre)

    class Process(uvicorn.Server):
        """uvicorn's, which ends in our order: first the requests, then the listening."""

        deadline = float("inf")

        def handle_exit(self, sig: int, frame) -> None:
            if server.door.closing:
                self.force_exit = self.should_exit = True
            server.door.closing = True
            self.deadline = time.monotonic() + args.grace_period

        async def on_tick(self, counter: int) -> bool:
            if server.door.closing and (not server.door.num_open
                                        or time.monotonic() > self.deadline):
                self.should_exit = True
            return await super().on_tick(counter)

    config = uvicorn.Config(server.door, host=args.host, port=args.port, access_log=False,
                            log_config=None, log_level="warning", lifespan="off",
                            server_header=False, timeout_graceful_shutdown=1)
    listening = config.bind_socket()
    if not args.quiet:
        _tell(server, llm, name, listening.getsockname()[1], args, keys)
    await Process(config).serve([listening])
    if not args.quiet:
        print("ended", file=sys.stderr)


def _tell(server: Server, llm: LLM, name: str, port: int, args, keys: list[str]) -> None:
    """What is served, where, to whom, and with how much room."""
    config = llm.engine.config
    host = f"[{args.host}]" if ":" in args.host else args.host
    who = (f"whoever brings {'the' if len(keys) == 1 else 'one of the ' + str(len(keys))} "
           f"API key{'s' * (len(keys) > 1)}" if keys else "whoever comes, without a key")
    print(
        f"serving {name!r} at http://{host}:{port} to {who}\n"
        f"  a page to chat   http://{host}:{port}/\n"
        f"  for clients      base_url=http://{host}:{port}/v1 model={name}\n"
        f"  for Prometheus   http://{host}:{port}/metrics\n" +
        (f"  the theatre      http://{host}:{port}/theatre shows prompts"
         f"{'; the API key is the password, under any name' if keys else ''}\n"
         if args.theatre else "") + f"room for {config.max_num_seqs} requests at once and "
        f"{server.desk.max_requests - config.max_num_seqs} that wait, in {config.num_blocks} "
        f"blocks of {config.block_size} tokens; {config.max_model_len} tokens a request at most",
        file=sys.stderr, flush=True)
    if not keys and args.host not in LOCAL_HOSTS:
        print("warning: everybody who reaches this address may use the model; set --api-key",
              file=sys.stderr, flush=True)
