"""Who may come in, and with what: before anything of a request is looked at."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.server.errors import ApiError
from paged.server.meters import Meters

LOG = logging.getLogger("paged.server")
OPEN_TO_ALL = ("/", "/health")  # the page asks for a key, and a balancer has none
# A browser that opens a page can ask for a password, and sends no other key. Nothing that changes
# anything may stand here: it sends the password along whichever site made it come.
ASKED_BY_BROWSERS = ("/theatre",)
POLLED = ("/health", "/metrics")  # every few seconds: no line of the log for each
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """What a request may bring; beyond it, it is refused.

    Attributes:
        body_bytes: of its body.
        body_seconds: until its body is there.
        send_seconds: until its client takes a piece of the answer; then it has left.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    send_seconds: float = 60.0


class Door:
    """Lets requests in one by one.

    Args:
        app: what stands behind it.
        keys: one of them must be brought; none is needed if there are none.
        local_only: answer to names of this machine alone. Without keys this keeps out pages of
            other sites whose name was made to point here.
        meters: count what is not let in, and what fails.
        log_prompts: let the log say what may hold a part of a prompt.

    Attributes:
        closing: set once; from then on whoever comes gets a 503.
        num_open: requests that have not been answered to their end.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), local_only: bool = False,
                 limits: Limits = Limits(), meters: Meters | None = None,
                 log_prompts: bool = False):
        self.app, self.local_only, self.limits, self.meters = app, local_only, limits, meters
        self.log_prompts, self.closing, self.num_open = log_prompts, False, 0
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status, path = time.perf_counter(), 0, scope["path"]

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            with anyio.fail_after(self.limits.send_seconds):
                await send(message)

        self.num_open += 1
        try:
            self._check(scope)
            receive = await self._whole_body(scope, receive)
            await self.app(scope, receive, noting)
        except ApiError as error:
            await error.response()(scope, receive, noting)
        except TimeoutError:  # who does not read keeps no place from others
            LOG.info("a client has not read for %g s", self.limits.send_seconds)
        except Exception as error:
            self._log_failure(error)
            if not status:
                failure = ApiError(500, "the server has failed at this request", None, "failed")
                await failure.response()(scope, receive, noting)
        finally:
            self.num_open -= 1
            if status >= 400 and self.meters is not None:
                self.meters.refused.labels(str(status)).inc()
            level = logging.DEBUG if path in POLLED and status == 200 else logging.INFO
            LOG.log(level, "%s %s %s after %.3f s", scope["method"], ascii(path), status or "left",
                    time.perf_counter() - start)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError for who may not come in."""
        headers, path = dict(scope["headers"]), scope["path"]
        if self.closing and path != "/metrics":
            raise ApiError(503, "the server is about to end: ask another one", None,
                           "shutting_down", {"Retry-After": "10", "Connection": "close"})
        host = headers.get(b"host", b"").decode("latin-1")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.local_only and name.lower() not in LOCAL:
            raise ApiError(
                403, "this server answers to 127.0.0.1 and localhost: start it with an "
                "--api-key, or with another --host", None, "wrong_host")
        if self._digests and path not in OPEN_TO_ALL:
            scope["tenant"] = self._tenant(headers.get(b"authorization", b""), path)
        if scope["method"] == "POST":
            # A browser asks before it sends this type to another site: no page can use us unseen.
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise ApiError(415, "the body must be JSON: send Content-Type: application/json",
                               None, "wrong_content_type")
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > self.limits.body_bytes:
                raise self._too_large()

    def _tenant(self, authorization: bytes, path: str) -> str:
        """A name for whoever has this key, which does not tell the key; raises ApiError."""
        scheme, _, key = authorization.partition(b" ")
        how = "Bearer"
        if path in ASKED_BY_BROWSERS:
            how = 'Basic realm="the API key is the password", charset="UTF-8"'
            if scheme.lower() == b"basic":
                scheme, key = b"bearer", _password(key)
        digest = _digest(key.strip())
        # All are compared, and each whole: the time says nothing about how much was right.
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(401, "no valid API key: send it as Authorization: Bearer KEY", None,
                           "invalid_api_key", {"WWW-Authenticate": how})
        return digest.hex()

    async def _whole_body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the body, as far as there may be one; returns a `receive` that begins with it."""
        if scope["method"] != "POST":
            return receive
        parts: list[bytes] = []

        async def read() -> None:
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the body has no end", None, "incomplete_body")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > self.limits.body_bytes:
                    raise self._too_large()

        try:
            await asyncio.wait_for(read(), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body was not there after {self.limits.body_seconds:g} s",
                           None, "incomplete_body", {"Connection": "close"}) from None
        first: list[Message] = [{
            "type": "http.request", "body": b"".join(parts), "more_body": False
        }]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limits.body_bytes} bytes", None,
                        "body_too_large", {"Connection": "close"})

    def _log_failure(self, error: Exception) -> None:
        """Where it failed; what the exception says may quote a prompt."""
        where = "".join(traceback.format_tb(error.__traceback__))
        what = f"{type(error).__name__}: {error}" if self.log_prompts else type(error).__name__
        LOG.error("a request has failed\n%s%s", where, what)


def _password(credentials: bytes) -> bytes:
    """Of HTTP's Basic scheme; nothing if they are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"paged api key\0" + key).digest()
