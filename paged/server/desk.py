"""A request on its way: its place in the queue, its call, and what is left of it at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, TypeVar

from paged.async_llm import AsyncLLM
from paged.call import Call, Checked, News
from paged.request import RequestOutput
from paged.server.asked import check_end, checked
from paged.server.errors import ApiError
from paged.server.fields import Body
from paged.server.meters import Meters

LOG = logging.getLogger("paged.server")
Result = TypeVar("Result")


class Desk:
    """Between routes and engine.

    Args:
        llm: the model.
        max_requests: sequences that may be under way at once, running and waiting; whoever comes
            then is told to come again.
        meters: count what ends.
        log_prompts: write prompts and answers into the log.
    """

    def __init__(self, llm: AsyncLLM, max_requests: int, meters: Meters, log_prompts: bool = False):
        self.llm, self.max_requests, self.meters = llm, max_requests, meters
        self.log_prompts, self.num_sequences = log_prompts, 0

    @contextmanager
    def place(self, num_sequences: int) -> Iterator[None]:
        """A place in the queue for so many sequences. Raises ApiError where there is none."""
        if num_sequences > self.max_requests:
            raise ApiError(
                400, f"the request takes {num_sequences} sequences, and this server "
                f"holds {self.max_requests}: ask for less at once", None, "too_many_sequences")
        if self.num_sequences + num_sequences > self.max_requests:
            raise ApiError(
                429, f"{self.num_sequences} sequences are under way, and this server "
                f"holds {self.max_requests}: come again", None, "queue_full", {"Retry-After": "1"})
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    async def check(self, body: Body, prompt, salt: str | None) -> Checked:
        """A prompt of a body as a request that can be served. Raises ApiError."""
        # A long prompt takes the tokenizer a while.
        return await asyncio.to_thread(checked, self.llm.llm, body, prompt, salt)

    async def run(self, requests: Sequence[Checked]) -> list[RequestOutput]:
        """All requests to their end. Raises ApiError where one fails."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.stream(requests, partial=False):
            last[index] = output
        return [last[index] for index in range(len(requests))]

    async def stream(self, requests: Sequence[Checked],
                     partial: bool = True) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of a request, its output), whenever one has more, or, unless partial, has ended.
        The next of it is asked for when this one has been taken, so that a slow reader finds all
        that has come meanwhile in one. Who stops reading aborts what has not ended. Raises ApiError
        where one fails."""
        box: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        calls: list[Call] = []
        try:
            for index, request in enumerate(requests):

                def put(news: News, index: int = index) -> None:
                    box.put_nowait((index, news))

                calls.append(self.llm.call([request], put, partial))
            for call in calls:
                call.start()
            left = len(calls)
            while left:
                index, news = await box.get()
                output = _whole(calls[index], news)
                yield index, output
                if output.finished:
                    left -= 1
                elif partial:
                    calls[index].ask()
        finally:
            for call in calls:
                call.close(wait=False)
                self.meters.ended(call)
                self._log(call)

    def _log(self, call: Call) -> None:
        for output in call.outputs:
            lengths = "+".join(str(len(c.token_ids)) for c in output.outputs)
            reasons = "+".join(c.finish_reason or "left" for c in output.outputs)
            LOG.info(
                "request %s: %d prompt tokens (%d cached), %s generated, %s", output.request_id,
                len(output.prompt_token_ids), output.num_cached_tokens, lengths, reasons)
            if self.log_prompts:
                LOG.info("request %s: %r -> %r", output.request_id, output.prompt
                         or output.prompt_token_ids, [c.text for c in output.outputs])


def _whole(call: Call, news: News) -> RequestOutput:
    """The output, if nothing has gone wrong; else ApiError."""
    try:
        output = call.next_output(news)
    except Exception as error:
        LOG.error("a step has failed: %s", type(error).__name__)
        raise ApiError(500, f"the engine has failed at this request ({type(error).__name__})", None,
                       "engine_failed") from None
    check_end(output)
    return output


async def until_left(receive: Callable[[], Awaitable[Mapping]], work: Coroutine[Any, Any,
                                                                                Result]) -> Result:
    """What the work returns; its end, and an ApiError, as soon as the client has left."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(499, "the client has left", None, "left")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
