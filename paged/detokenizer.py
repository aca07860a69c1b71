"""Token ids to text, one at a time, while they are generated.

Two things make this more than a lookup. A character may be spread over several tokens, so bytes
wait until they make a whole character. And a stop string may be spread over several tokens, so text
that might turn out to be the beginning of one waits until it cannot.

    token -> bytes -> [incomplete character] -> text -> [could begin a stop string] -> out
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial


class Detokenizer:
    """Incremental text of one request. The cost of a token does not grow with the text before it.

    tokenizer has .token_bytes(token_id) -> bytes, none for a special token unless one says
    skip_special_tokens=False. `matched` is the stop string that was found, or None; the text ends
    before it, or with it, and nothing follows.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = (), include_stop: bool = False,
                 skip_special_tokens: bool = True) -> None:
        self._token_bytes = (tokenizer.token_bytes if skip_special_tokens else partial(
            tokenizer.token_bytes, skip_special_tokens=False))
        self._include_stop = include_stop
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token; return the text that is now certain. may_stop: a stop string that is
        complete with this token ends the text."""
        return self._release(self._decode(self._token_bytes(token_id)), may_stop=may_stop)

    def finish(self) -> str:
        """The text that was still held back, with U+FFFD for a character that will not be
        completed."""
        return self._release(self._decode(b"", True), final=True)

    def _release(self, new: str, final: bool = False, may_stop: bool = True) -> str:
        if self.matched is not None:
            return ""
        text, before = self._held + new, len(self._held)
        self._held = ""
        if not self._stop:
            return text
        # As if characters came one by one: the stop string that is complete first ends the text,
        # and the longer one where two are complete at once.
        found = [(at + len(stop), -len(stop), stop) for stop in self._stop if may_stop
                 if (at := text.find(stop, max(before - len(stop) + 1, 0))) >= 0]
        if found:
            end, negative_length, self.matched = min(found)
            return text[:end if self._include_stop else end + negative_length]
        if not final:
            self._held = self._possible_beginning(text)
        return text[:len(text) - len(self._held)]

    def _possible_beginning(self, text: str) -> str:
        """The longest end of text with which a stop string begins."""
        for length in range(min(len(text), max(map(len, self._stop)) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return text[-length:]
        return ""
