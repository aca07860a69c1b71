"""A server on this machine, in a thread of its own: for chapters and tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from paged.async_llm import AsyncLLM
from paged.llm import LLM
from paged.server.app import Server, make_server


@contextlib.contextmanager
def served(llm: LLM, model: str, **options) -> Iterator[tuple[Server, str]]:
    """Serve a model at a free port; yields the server and its address. `options` are those of
    `make_server`. At the end the server ends, and the model stays."""
    server = make_server(AsyncLLM(llm), model, **options)
    config = uvicorn.Config(server.door, port=0, access_log=False, log_config=None, lifespan="off",
                            timeout_graceful_shutdown=1)
    listening, process = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=process.run, args=([listening],), daemon=True)
    thread.start()
    while not process.started:
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        process.should_exit = True
        thread.join()
