"""What a caller says to the owner of an engine, and hears from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from paged.request import RequestOutput
from paged.sampling import SamplingParams

if TYPE_CHECKING:
    from paged.owner import Owner


class Closed(ValueError):
    """The owner runs no calls any more."""


class Checked(NamedTuple):
    """A request that `Engine.check_request` has let pass.

    prompt is its text, or None; salt that of `Engine.add_request`.
    """

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    salt: str | None = None


class News(NamedTuple):
    """What a call hears of the request at a place of its list.

    Attributes:
        output: at its end, or a snapshot; it does not change any more.
        error: the exception of the step that failed because of this request.
    """

    place: int
    output: RequestOutput
    error: BaseException | None = None


class Call:
    """What one caller wants: requests that run together, and end with it.

    Args:
        owner: runs them.
        requests: as they are; one, if partial.
        put: takes News, on the owner's thread: of each request when it ends, and if partial, of one
            that goes on, once for `start` and once for each `ask`.

    Attributes:
        num_left: requests that have not ended.
    """

    def __init__(self, owner: Owner, requests: Sequence[Checked], put: Callable[[News], object],
                 partial: bool = False):
        self.owner, self.requests, self.put, self.partial = owner, requests, put, partial
        self.num_left, self.num_seen = len(requests), 0
        self.outputs: list[RequestOutput] = []
        self._shown: dict[int, int] = {}  # characters of each completion

    def start(self) -> None:
        """Queue the requests. Whatever happens from here on, even in here, `close` must follow."""
        if self.requests:
            self.owner.post(self.owner.add, self)

    def ask(self) -> None:
        """The caller wants the next tokens: some that are there already, or of a step to come."""
        with suppress(Closed):  # then the end is on its way
            self.owner.post(self.owner.ask, self)

    def close(self, wait: bool = True) -> None:
        """Abort what has not ended; wait: until that is done."""
        with suppress(Closed):
            if self.num_left:
                (self.owner.do if wait else self.owner.post)(self.owner.end, self)

    def next_output(self, news: News) -> RequestOutput:
        """What the caller is to see next, `new_text` being what came since the last time; raises
        what ended the request."""
        if news.error is not None:
            raise news.error
        for completion in news.output.outputs:
            completion.new_text = completion.text[self._shown.get(completion.index, 0):]
            self._shown[completion.index] = len(completion.text)
        return news.output

    def outputs_of(self, ended: list[News]) -> list[RequestOutput]:
        """The outputs in the order of the requests; raises what ended them if that was all."""
        if ended and ended[-1].error is not None and all(news.error for news in ended):
            raise ended[-1].error
        return [news.output for news in sorted(ended, key=lambda news: news.place)]
