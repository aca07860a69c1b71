"""The routes, and the page at /."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from paged.async_llm import AsyncLLM
from paged.call import Checked
from paged.request import RequestOutput
from paged.server.answers import Answer
from paged.server.asked import answer_of, check_model
from paged.server.desk import Desk, until_left
from paged.server.door import Door, Limits
from paged.server.errors import ApiError, invalid, refused
from paged.server.fields import Body, ChatBody, CompletionBody
from paged.server.meters import Meters


class Server(NamedTuple):
    """What a server consists of: the door is the application for an ASGI server."""

    door: Door
    desk: Desk


def make_server(llm: AsyncLLM, model: str, keys: Sequence[str] = (), share_prefixes: bool = False,
                max_requests: int | None = None, local_only: bool = False,
                limits: Limits = Limits(), log_prompts: bool = False,
                theatre: bool = False) -> Server:
    """A server in front of a model.

    Args:
        model: its name in the interface.
        keys: who brings one of them may come in; all may if there are none.
        share_prefixes: let the holders of different keys share the blocks of common prefixes. By
            how many of its tokens are cached, and by its speed, each can then find out what others
            have asked.
        max_requests: sequences under way at once; None for twice as many as run at once.
        local_only, limits, log_prompts: see `Door` and `Desk`.
        theatre: record the last steps and show them at /theatre, with everybody's prompts, to
            whoever may come in.

    Raises ValueError for a theatre over a pool that is too large to be looked at.
    """
    most = 2 * llm.llm.engine.config.max_num_seqs if max_requests is None else max_requests
    meters = Meters(llm.llm.engine)
    desk = Desk(llm, most, meters, log_prompts)
    app = FastAPI(title="paged", docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_rooms(app, desk, model)
    if theatre:
        from paged.server.theatre import add_theatre
        add_theatre(app, llm.llm)

    def salt_of(body: Body, request: Request) -> str | None:
        """What its blocks are kept apart by: the tenant, and what the request says."""
        tenant = "" if share_prefixes else request.scope.get("tenant", "")
        return f"{tenant}\0{body.cache_salt or ''}" if tenant or body.cache_salt else None

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answered(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await answered(body, request)

    async def answered(body: Body, request: Request) -> Response:
        check_model(body, model)
        with ExitStack() as place:
            place.enter_context(desk.place(len(body.prompts) * body.sequences))
            salt = salt_of(body, request)
            requests = [await desk.check(body, prompt, salt) for prompt in body.prompts]
            answer = answer_of(llm.llm, body, model, requests)
            return await _answer(desk, answer, body, request, requests, place)

    return Server(Door(app, keys, local_only, limits, meters, log_prompts), desk)


async def _answer(desk: Desk, answer: Answer, body: Body, request: Request, requests: list[Checked],
                  place: ExitStack) -> Response:
    if body.stream:
        return Events(_events(desk, answer, requests, body.include_usage), place.pop_all())
    outputs = await until_left(request.receive, desk.run(requests))
    return JSONResponse(answer.whole(outputs), headers={"X-Request-Id": answer.id})


async def _events(desk: Desk, answer: Answer, requests: list[Checked],
                  include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. What has been sent is never taken back."""
    last: dict[int, RequestOutput] = {}
    nothing = {"usage": None} if include_usage else {}
    try:
        async with aclosing(desk.stream(requests)) as news:
            async for index, output in news:
                last[index] = output
                chunks = [_event(chunk | nothing) for chunk in answer.chunks(index, output)]
                if chunks:
                    yield "".join(chunks)
        if include_usage:
            yield _event(answer.usage_chunk([last[index] for index in sorted(last)]))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status has long been sent
        yield _event(error.body())


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


class Events(StreamingResponse):
    """A stream that closes its source and gives up its place in the queue, however it ends."""

    def __init__(self, events: AsyncIterator[str], place: ExitStack):
        # A proxy that waits for the end would make a stream of one piece.
        super().__init__(events, media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.place:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Starlette's, and then the source is closed at once, not when it is collected."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


def _add_rooms(app: FastAPI, desk: Desk, model: str) -> None:
    """What is there to look at."""
    config, started = desk.llm.llm.engine.config, int(time.time())
    card = {
        "id": model, "object": "model", "created": started, "owned_by": "paged",
        "max_model_len": config.max_model_len
    }
    page = files("paged.server").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {
        kind: " ".join(f"'sha256-{sha256(part)}'"
                       for part in re.findall(f"<{kind}>(.*?)</{kind}>", page, re.S))
        for kind in ("script", "style")
    }
    only_itself = (f"default-src 'none'; script-src {hashes['script']}; "
                   f"style-src {hashes['style']}; connect-src 'self'; img-src data:; "
                   "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")

    @app.get("/", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(
            page, headers={"Content-Security-Policy": only_itself, "Cache-Control": "no-cache"})

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(desk.meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict:
        if name != model:
            raise ApiError(404, f"there is no model {name!r} here: this server has {model!r}",
                           "model", "model_not_found")
        return card


def sha256(text: str) -> str:
    """As a Content-Security-Policy names a script or a style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _add_errors(app: FastAPI) -> None:
    """Whatever goes wrong is said in one form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = invalid(error.errors())
        elif isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), None,
                             "not_found" if error.status_code == 404 else "bad_request")
        elif isinstance(error, ValueError):
            chat = request.url.path.startswith("/v1/chat")
            error = refused(error, (ChatBody if chat else CompletionBody).model_fields)
        elif not isinstance(error, ApiError):  # the door says more of it in the log
            error = ApiError(500, "the server has failed at this request", None, "failed")
        return error.response()

    for kind in (ApiError, RequestValidationError, HTTPException, ValueError, Exception):
        app.add_exception_handler(kind, answer)
