"""Every line of a file of requests gets its result.

So many lines are with the engine at once as it is given, and each is replaced when its result has
been written: `answer` gives the result of a line, from this process or from another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paged.offline.requests import Line

if TYPE_CHECKING:
    from paged.async_llm import AsyncLLM

MOST_FAILURES = 16
"""Lines in a row at which an engine may fail until it, and not the lines, is at fault."""

Answer = Callable[[Line], Awaitable[dict[str, Any]]]


async def answer_line(llm: AsyncLLM, model: str, line: Line) -> dict[str, Any]:
    """The result of a line, as the server would answer it: {id, custom_id, response, error}.

    model: the name that a body may give, or leave away. Raises what the engine raises when it
    fails.
    """
    from paged.server.asked import answer_of, check_end, check_model, checked, read
    from paged.server.errors import ApiError
    if line.problem is not None:
        return _result(line, error={"code": "invalid_line", "message": line.problem})
    try:
        given = {"model": model, **line.body} if isinstance(line.body, dict) else line.body
        body = read(line.path, given)
        check_model(body, model)
        if body.stream:
            raise ApiError(400, "stream is true: a file takes whole answers, leave it away",
                           "stream", "unsupported_parameter")
        requests = [checked(llm.llm, body, prompt, body.cache_salt) for prompt in body.prompts]
        answer = answer_of(llm.llm, body, model, requests)
        outputs = await llm.run(requests)
        for output in outputs:
            check_end(output)
        return _answered(line, 200, answer.whole(outputs))
    except ApiError as error:
        return _answered(line, error.status, error.body())


async def answer_all(lines: Iterable[Line], answer: Answer, write: Callable[[dict], object],
                     num_at_once: int) -> None:
    """Have every line answered, and every result written as soon as it is there.

    If `answer` raises, that is the line's result, once another line has been answered after it:
    MOST_FAILURES in a row are the engine's failure. Then the last is raised, and these lines have
    no result yet.
    """
    left, failed = iter(lines), list[tuple[Line, Exception]]()

    def write_failed() -> None:
        while failed:
            line, error = failed.pop()
            words = f"the engine has failed at this request: {str(error) or type(error).__name__}"
            body = {
                "message": words, "type": "server_error", "param": None, "code": "engine_failed"
            }
            write(_answered(line, 500, {"error": body}))

    async def work() -> None:
        for line in left:
            try:
                result = await answer(line)
            except Exception as error:
                failed.append((line, error))
                if len(failed) >= MOST_FAILURES:
                    raise
                continue
            write(result)
            if (result["response"] or {}).get("status_code") == 200:
                write_failed()

    workers = [asyncio.create_task(work()) for _ in range(num_at_once)]
    try:
        await asyncio.gather(*workers)
        write_failed()
    finally:
        for worker in workers:
            worker.cancel()
        with suppress(Exception):
            await asyncio.gather(*workers, return_exceptions=True)


def _answered(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return _result(line, {"status_code": status, "request_id": f"req_{line.id}", "body": body})


def _result(line: Line, response=None, error=None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.id}", "custom_id": line.custom_id, "response": response,
        "error": error
    }
