"""`LLM` for asyncio: the same engine under the same owner; what waits is a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from paged.call import Call, Checked, News
from paged.llm import LLM
from paged.prompts import Prompt
from paged.request import RequestOutput
from paged.sampling import SamplingParams


class AsyncLLM:
    """A language model whose calls are awaited, from any number of tasks and event loops.

    Takes what `LLM` takes, or an LLM that there is already. A task that is cancelled aborts its own
    requests.

    Attributes:
        llm: the LLM behind it, which threads may call meanwhile.
    """

    def __init__(self, *args, **kwargs):
        given = len(args) == 1 and isinstance(args[0], LLM) and not kwargs
        self.llm = args[0] if given else LLM(*args, **kwargs)

    async def generate(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """`LLM.generate`."""
        return await self.run(self.llm.check(prompts, sampling_params))

    async def chat(self, messages: list[dict] | Sequence[list[dict]],
                   sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                   **options) -> list[RequestOutput]:
        """`LLM.chat`; the options are those of `tokenizer.chat`."""
        return await self.run(self.llm.check(messages, sampling_params, options))

    def stream(self, prompt: Prompt,
               sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """`LLM.stream`, for `async for`."""
        (request,) = self.llm.check([prompt], sampling_params)
        return self._stream(request)

    async def abort(self, request_id: str) -> bool:
        """`LLM.abort`."""
        return await asyncio.to_thread(self.llm.abort, request_id)

    async def close(self) -> None:
        """`LLM.close`."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    def call(self, requests: Sequence[Checked], put: Callable[[News], object],
             partial: bool = False) -> Call:
        """A `Call` of the running event loop, in which `put` is called."""
        loop = asyncio.get_running_loop()

        def put_there(news: News) -> None:
            try:
                loop.call_soon_threadsafe(put, news)
            except RuntimeError:  # the loop has been closed: nobody waits any more
                pass

        return Call(self.llm.owner, requests, put_there, partial)

    async def run(self, requests: list[Checked]) -> list[RequestOutput]:
        """Complete what `LLM.check` has let pass, as one call."""
        box: asyncio.Queue[News] = asyncio.Queue()
        call = self.call(requests, box.put_nowait)
        try:
            call.start()
            return call.outputs_of([await box.get() for _ in requests])
        finally:
            call.close(wait=False)

    async def _stream(self, request: Checked) -> AsyncIterator[RequestOutput]:
        box: asyncio.Queue[News] = asyncio.Queue()
        call = self.call([request], box.put_nowait, partial=True)
        try:
            call.start()
            while True:
                news = await box.get()
                yield call.next_output(news)
                if news.output.finished:
                    return
                call.ask()
        finally:
            call.close(wait=False)
