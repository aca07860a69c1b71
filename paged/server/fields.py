"""What a request may ask, field by field. Each field of OpenAI's interface stands here: it is
honoured, or it is refused by name.

Sampling goes beyond that interface under the names of `SamplingParams`, which are vLLM's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paged.sampling import SamplingParams
from paged.server.errors import ApiError

NO_TOOLS = "a model's text is not searched for tool calls here"
# Fields that ask for what this server lacks: the values that ask for nothing, and the reason.
REFUSED: dict[str, tuple[tuple, str]] = {
    "audio": ((), "this server reads and writes text"),
    "function_call": (("none",), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "metadata": (({},), "nothing is stored here that it could belong to"),
    "modalities": ((["text"],), "this server reads and writes text"),
    "moderation": ((), "nothing is moderated here"),
    "parallel_tool_calls": ((), NO_TOOLS),
    "prediction": ((), "no answer is predicted here"),
    "prompt_cache_key": ((), "prefixes are found by their tokens; cache_salt keeps them apart"),
    "prompt_cache_options": ((), "blocks are kept as long as there is room"),
    "prompt_cache_retention": ((), "blocks are kept as long as there is room"),
    "reasoning_effort": ((), "what a template knows of it goes through chat_template_kwargs"),
    "response_format": (({"type": "text"},), "answers are not held to a format here"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored here"),
    "suffix": (("",), "text is continued, not filled in, here"),
    "tool_choice": (("none",), NO_TOOLS),
    "tools": (([],), NO_TOOLS),
    "verbosity": ((), "no model here knows it"),
    "web_search_options": ((), "nothing is searched here"),
    # vLLM's, which its users may send
    "chat_template": ((), "a template is a program: the model's own is used"),
    "guided_choice": ((), "answers are not held to a format here"),
    "guided_grammar": ((), "answers are not held to a format here"),
    "guided_json": ((), "answers are not held to a format here"),
    "guided_regex": ((), "answers are not held to a format here"),
    "priority": ((0,), "requests run in the order in which they came"),
    "structured_outputs": ((), "answers are not held to a format here"),
    "use_beam_search": ((False,), "beams are searched by LLM.beam_search only"),
}
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1000)]
Ids = Annotated[list[int], Field(max_length=1000)]


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _no_padding(self):
        if self.include_obfuscation:
            raise ValueError("include_obfuscation: chunks are not padded here")
        return self


class Body(BaseModel):
    """What completions and conversations have in common. A field that is null is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: Count | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-2**63, lt=2**63)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=300)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # whom it is for changes nothing
    safety_identifier: str | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    bad_words: Annotated[list[Text], Field(max_length=100)] | None = None
    allowed_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        """Leaves out what asks for nothing; refuses by name what is not to be had."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() & (REFUSED.keys() - cls.model_fields.keys()):
            harmless, reason = REFUSED[name]
            if not any(
                    type(given[name]) is type(value) and given[name] == value
                    for value in harmless):
                raise ApiError(400, f"{name} is not supported: {reason}", name,
                               "unsupported_parameter")
            del given[name]
        return given

    @model_validator(mode="after")
    def _check(self):
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streamed answers: set stream to true",
                           "stream_options", "invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed: leave stream away",
                           "prompt_logprobs", "invalid_value")
        return self

    @property
    def prompts(self) -> list:
        """One entry a prompt."""
        raise NotImplementedError

    @property
    def sequences(self) -> int:
        """Sequences that the answer to a prompt takes."""
        return self.n

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to show beside each; None shows no log-probabilities."""
        raise NotImplementedError

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of `tokenizer.chat`."""
        return {}

    def params(self, defaults: SamplingParams, longest: int, num_tokens: int) -> SamplingParams:
        """What it asks of the sampler, for a prompt of so many tokens and an engine that holds
        `longest`; `defaults` say the rest. Raises ApiError and ValueError."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams, max_tokens: int, logprobs: int | None,
                 prompt_logprobs: int | None = None) -> SamplingParams:
        """Its fields as they are, and what only its kind knows."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        if given.get("top_k") == -1:  # another way to say: all
            given["top_k"] = 0
        if "logit_bias" in given:
            try:
                given["logit_bias"] = {
                    int(token): bias
                    for token, bias in given["logit_bias"].items()
                }
            except ValueError:
                raise ApiError(400, "the keys of logit_bias must be token ids", "logit_bias",
                               "invalid_value") from None
        given.setdefault("prompt_logprobs", prompt_logprobs)
        return replace(defaults, **given, n=self.sequences, max_tokens=max_tokens,
                       logprobs=logprobs)


# Fields that go to the sampler as they are.
SAMPLING = Body.model_fields.keys() - {
    "model", "n", "max_tokens", "stream", "stream_options", "user", "safety_identifier",
    "cache_salt"
}


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: (str | Annotated[list[int], Field(min_length=1)]
             | Annotated[list[str], Field(min_length=1)]
             | Annotated[list[list[int]], Field(min_length=1)])
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list:
        several = not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]

    @property
    def sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def params(self, defaults: SamplingParams, longest: int, num_tokens: int) -> SamplingParams:
        most = 16 if self.max_tokens is None else max(1, self.max_tokens)
        ranked = self.sequences > self.n  # by their log-probabilities
        logprobs = 0 if ranked and self.logprobs is None else self.logprobs
        return self.sampling(defaults, most, logprobs, self.logprobs if self.echo else None)

    @model_validator(mode="after")
    def _check_completion(self):
        if self.best_of is not None and self.best_of < self.n:
            raise ApiError(400, f"best_of is {self.best_of}: it must be at least n, {self.n}",
                           "best_of", "invalid_value")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise ApiError(400, "max_tokens is 0: it must be at least 1, but to echo a prompt",
                           "max_tokens", "invalid_value")
        if self.stream and self.sequences > self.n:
            raise ApiError(400, "best_of cannot be streamed: the best is known at the end",
                           "best_of", "invalid_value")
        return self


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_chat(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", "top_logprobs",
                           "invalid_value")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them",
                           "max_completion_tokens", "invalid_value")
        return self

    @property
    def prompts(self) -> list:
        return [[_message(f"messages.{i}", message) for i, message in enumerate(self.messages)]]

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: SamplingParams, longest: int, num_tokens: int) -> SamplingParams:
        taken = min(num_tokens, self.truncate_prompt_tokens or num_tokens)
        room = max(1, longest - taken + 1)
        limits = self.max_completion_tokens, self.max_tokens, room
        most = next(limit for limit in limits if limit is not None)
        return self.sampling(defaults, most, self.likeliest)

    @property
    def template_options(self) -> dict[str, Any]:
        options = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs, "documents": self.documents
        }
        return {name: value for name, value in options.items() if value is not None}


IN_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is empty, refused by name where it holds more than text."""
    message = {
        name: value
        for name, value in message.items()
        if value is not None and (value != [] or name == "content")
    }
    for name in message:
        if name not in IN_MESSAGES:
            raise ApiError(400, f"{name} in {place} is not supported", f"{place}.{name}",
                           "unsupported_parameter")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ApiError(400, f"a part of {place} is of type {kind!r}: this server reads text",
                           f"{place}.content", "unsupported_parameter")
    if message.get("role") == "developer":  # the newer name
        message["role"] = "system"
    if "tool_calls" in message:
        message["tool_calls"] = _calls(f"{place}.tool_calls", message["tool_calls"])
    return message


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of a message, their arguments as the objects that templates take."""
    try:
        read = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            read.append({**call, "function": function})
        return read
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ApiError(400, f"{place} must be calls of functions, their arguments JSON", place,
                       "invalid_value") from None
