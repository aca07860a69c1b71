"""What the engine gives, in the forms of OpenAI's interface."""

from __future__ import annotations

import math
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paged.request import CompletionOutput, RequestOutput

TokenBytes = Callable[..., bytes]
LEAST = -9999.0
"""Stands for minus infinity, which JSON does not know."""


class Answer:
    """One answer, whole or in pieces.

    Args:
        chat: a conversation's, not a completion's.
        model: its name.
        token_bytes: the bytes of a token, as text, or, if the second argument is True, as its name;
            needed for log-probabilities only.
        likeliest: likeliest tokens to show beside each; None shows no log-probabilities.
        num_choices: completions of a prompt that are shown, the best of those there are.
        echoed: the text of each prompt, where it goes before its completions.
        prompt_only: the completions are not shown.
    """

    def __init__(self, chat: bool, model: str, token_bytes: TokenBytes | None,
                 likeliest: int | None = None, num_choices: int = 1,
                 echoed: Sequence[str] | None = None, prompt_only: bool = False):
        self.chat, self.model, self.token_bytes = chat, model, token_bytes
        self.likeliest, self.num_choices = likeliest, num_choices
        self.echoed, self.prompt_only = echoed, prompt_only
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self._choices: dict[int, _Choice] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict:
        """The answer of requests that have ended."""
        choices = []
        for prompt, output in enumerate(outputs):
            if self.prompt_only:  # a token had to be drawn
                for completion in output.outputs:
                    completion.text, completion.token_ids, completion.logprobs = "", [], []
            for number, completion in enumerate(best(output.outputs, self.num_choices)):
                choice = self._choice(prompt, number)
                shown = choice.ended(completion)
                shown["logprobs"] = self._logprobs(choice, completion, output)
                if output.prompt_logprobs is not None and self.token_bytes is not None:
                    shown["prompt_logprobs"] = self._of_prompt(output.prompt_logprobs)
                if self.chat:
                    shown["message"] = {
                        "role": "assistant", "content": completion.text, "refusal": None
                    }
                else:
                    shown["text"] = choice.echo + completion.text
                choices.append(shown)
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": usage(outputs)}

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[dict]:
        """What has come for a prompt since the last time: one chunk a choice that has more."""
        for completion in output.outputs:
            choice = self._choice(prompt, completion.index)
            logprobs = self._logprobs(choice, completion, output)
            ends = completion.finish_reason is not None and not choice.has_ended
            text = completion.new_text
            if not self.chat and not choice.begun:
                text = choice.echo + text
            if not (text or logprobs or ends or self.chat and not choice.begun):
                continue
            shown: dict[str, Any] = choice.ended(completion) | {"logprobs": logprobs}
            if self.chat:
                role = {} if choice.begun else {"role": "assistant"}
                shown["delta"] = role | ({"content": text} if text or role else {})
            else:
                shown["text"] = text
            choice.begun, choice.has_ended = True, choice.has_ended or ends
            yield self._chunk([shown])

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict:
        """The end of a stream that was asked for its usage."""
        return self._chunk([]) | {"usage": usage(outputs)}

    def _chunk(self, choices: list[dict]) -> dict:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": choices}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, prompt: int, number: int) -> _Choice:
        index = prompt * self.num_choices + number
        if index not in self._choices:
            self._choices[index] = _Choice(index, self.echoed[prompt] if self.echoed else "")
        return self._choices[index]

    def _logprobs(self, choice: _Choice, completion: CompletionOutput,
                  output: RequestOutput) -> dict | None:
        """Of the tokens that have come since the last time; of an echoed prompt first."""
        if self.likeliest is None or completion.logprobs is None or self.token_bytes is None:
            return None
        tokens = completion.token_ids[choice.num_tokens:]
        found: list[dict[int, float] | None] = list(
            completion.logprobs[choice.num_tokens:len(completion.token_ids)])
        if self.echoed is not None and not choice.num_tokens and output.prompt_logprobs is not None:
            tokens, found = output.prompt_token_ids + tokens, output.prompt_logprobs + found
        choice.num_tokens = len(completion.token_ids)
        if not tokens:
            return None
        if self.chat:
            content = [self._entry(token, known) for token, known in zip(tokens, found) if known]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._name(token) for token in tokens], "token_logprobs": [
                None if known is None else _finite(known[token])
                for token, known in zip(tokens, found)
            ], "top_logprobs": [
                None if known is None else {
                    self._name(other): _finite(known[other])
                    for other in self._likeliest(known) | {token: 0}
                } for token, known in zip(tokens, found)
            ], "text_offset": [choice.offset(self.token_bytes(token)) for token in tokens]
        }

    def _of_prompt(self, found: Sequence[dict[int, float] | None]) -> list[dict | None]:
        """As in vLLM: {token id: {"logprob", "decoded_token"}} a token of the prompt."""
        return [
            None if known is None else {
                str(token): {"logprob": _finite(value), "decoded_token": self._name(token)}
                for token, value in known.items()
            } for known in found
        ]

    def _entry(self, token: int, known: dict[int, float]) -> dict:
        return self._named(token, known) | {
            "top_logprobs": [self._named(other, known) for other in self._likeliest(known)]
        }

    def _named(self, token: int, known: dict[int, float]) -> dict:
        assert self.token_bytes is not None
        return {
            "token": self._name(token), "logprob": _finite(known[token]), "bytes": list(
                self.token_bytes(token, True))
        }

    def _likeliest(self, known: dict[int, float]) -> dict[int, float]:
        """As many as were asked for: the chosen token stands beside them."""
        return dict(sorted(known.items(), key=lambda item: -item[1])[:self.likeliest])

    def _name(self, token: int) -> str:
        """The token's text; its bytes where they are no text, its id where it has none."""
        assert self.token_bytes is not None
        own = self.token_bytes(token, True)
        try:
            return own.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


class _Choice:
    """How far one choice of an answer has been shown.

    Attributes:
        num_tokens: tokens whose log-probabilities were shown.
        begun, has_ended: whether a chunk of it was sent, and its last.
    """

    def __init__(self, index: int, echo: str):
        self.index, self.echo = index, echo
        self.num_tokens, self.begun, self.has_ended = 0, False, False
        self._num_characters = 0
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def ended(self, completion: CompletionOutput) -> dict[str, Any]:
        """Its place, and how it ended, if it has."""
        return {
            "index": self.index, "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason
        }

    def offset(self, token: bytes) -> int:
        """Characters before the next token."""
        before = self._num_characters
        self._num_characters += len(self._decode(token))
        return before


def best(completions: list[CompletionOutput], number: int) -> list[CompletionOutput]:
    """So many completions: those with the highest log-probability a token, the best first; in
    their order where all are wanted."""
    if number == len(completions):
        return completions
    return sorted(completions,
                  key=lambda c: -(c.cumulative_logprob or 0.0) / max(1, len(c.token_ids)))[:number]


def usage(outputs: Sequence[RequestOutput]) -> dict:
    """Tokens: those of the prompts, those found in the prefix cache, and those generated."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached}
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
