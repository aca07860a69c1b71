"""The page at /theatre: the engine's last steps as panels, where the server was asked to keep
them."""

from __future__ import annotations

import asyncio
import re
import time
from html import escape

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from paged.lab.theatre import LastSteps, page
from paged.llm import LLM
from paged.server.app import sha256

STEPS = 50


def add_theatre(app: FastAPI, llm: LLM) -> None:
    """Record the engine's last steps from now on, and show them at /theatre. Raises ValueError for
    a pool that is too large to be looked at."""
    recorder = LastSteps(STEPS)
    llm.owner.do(recorder.watch, llm.engine)
    one_at_a_time = asyncio.Lock()

    @app.get("/theatre", include_in_schema=False)
    async def theatre() -> HTMLResponse:
        async with one_at_a_time:
            html = await asyncio.to_thread(snapshot, llm, recorder)
        (script,) = re.findall("<script>(.*?)</script>", html, re.S)
        only_itself = (f"default-src 'none'; script-src 'sha256-{sha256(script)}'; "
                       "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
                       "frame-ancestors 'none'")
        return HTMLResponse(
            html, headers={
                "Content-Security-Policy": only_itself,
                "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store"
            })


def snapshot(llm: LLM, recorder: LastSteps) -> str:
    """The page of what is recorded now. The engine waits while it is copied, not while the page is
    made of it."""
    recording = recorder.told(llm.owner.do(recorder.copied, "The last steps", "", "now"))
    beats, now = recording["beats"], time.strftime("%H:%M:%S")
    first, last = max(1, beats[0]["step"]), beats[-1]["step"]
    start = next(i for i, beat in enumerate(beats, 1) if beat["step"] == last)
    what = f"Steps {first} to {last} of this server" if len(beats) > 1 else "This server"
    above = (f'<p class="above">{escape(what)}, as it was at {now}. '
             '<a href="theatre">Take a new picture</a></p>\n')
    return page([recording], "paged: the last steps", above, f"now/{start}")
