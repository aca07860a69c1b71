"""OpenAI's bodies: a request's as what an engine takes, and what the engine gives as a response's.

    request body ─ read_body ─► Wanted ─ checked_requests ─► requests for the engine
                                                                      │
    response body ◄──────────────── response_body ◄────────── RequestOutputs

Whoever serves such bodies, from a socket or from a file, does it through these three, so that the
same body gets the same answer everywhere. Fields that would change the answer and that the engine
does not have are refused by name.

Follows OpenAI's API reference for /v1/chat/completions and /v1/completions. Beyond it a body may
have any field of SamplingParams, and the options of a chat template.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from paged.call import Checked, Closed
from paged.checks import whole_number
from paged.request import CompletionOutput, RequestOutput
from paged.sampling import SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, TEXT)
SAMPLING = {field.name for field in fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}
TEMPLATE = {
    "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"
}
ONLY_CHAT = TEMPLATE | {
    "messages", "max_completion_tokens", "top_logprobs", "tool_choice", "parallel_tool_calls",
    "modalities"
}
ONLY_TEXT = {"prompt", "best_of", "echo", "suffix"}
OTHERS = {"model", "logprobs", "stream", "stream_options", "response_format"}
WITHOUT_EFFECT = {
    "user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"
}
"""What a client notes about its request; no answer depends on it."""
ONLY_AS: dict[str, list] = {
    "best_of": [1], "echo": [False], "suffix": [""], "response_format": [{"type": "text"}],
    "tool_choice": ["none", "auto"], "parallel_tool_calls": [True], "modalities": [["text"]]
}
"""Fields of which the engine has only what it does anyway."""
MOST_LOGPROBS = 20
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class APIError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: of HTTP.
        body: OpenAI's error body, which names the field at fault, where there is one, in `param`.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None,
                 status: int = 400):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Wanted(NamedTuple):
    """What a body asks for.

    Attributes:
        chat: it is a conversation, not prompts to be continued.
        prompts: one or several; a conversation is one.
        params: of all of them.
        template: options of `tokenizer.chat`; None for what is no conversation.
        fill: no max_tokens was named: each answer may be as long as the engine can hold, and what
            params have is the least.
        stream: the answer is to come piece by piece.
        include_usage: and its counts after the last piece.
    """

    chat: bool
    prompts: list
    params: SamplingParams
    template: dict[str, Any] | None
    fill: bool
    stream: bool
    include_usage: bool


def read_body(path: str, body: Any, model: str, defaults: SamplingParams) -> Wanted:
    """A request body as the engine takes it.

    Args:
        path: CHAT or TEXT.
        model: the name of the model that is served; a body may leave it out, and not name another.
        defaults: what holds where the body says nothing; a null says nothing.

    Raises APIError.
    """
    if not isinstance(body, dict):
        raise APIError(f"the body is {_short(body)}: it must be a JSON object")
    chat = path == CHAT
    known = SAMPLING | OTHERS | WITHOUT_EFFECT | (ONLY_CHAT if chat else ONLY_TEXT)
    for name in body:
        if name not in known:
            raise APIError(f"{name} is no field that {path} of this engine has: leave it away",
                           name, "unknown_parameter")
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("model", model) != model:
        raise APIError(f"the model {_short(body['model'])} is not served here: {model!r} is",
                       "model", "model_not_found", 404)
    for name, allowed in ONLY_AS.items():
        if name in body and body[name] not in allowed:
            raise APIError(
                f"{name} is {_short(body[name])}: this engine has only "
                f"{' or '.join(map(repr, allowed))}", name)
    stream, usage = _bool(body, "stream"), body.get("stream_options", {})
    if not isinstance(usage, dict) or set(usage) - {"include_usage"}:
        raise APIError(
            f"stream_options is {_short(usage)}: it may hold include_usage and nothing "
            f"else", "stream_options")
    if usage and not stream:
        raise APIError(
            "stream_options are given and stream is not true: set it, or leave them "
            "away", "stream_options")
    asked = _sampling(body, chat)
    fill = chat and "max_tokens" not in asked
    if fill:
        asked["max_tokens"] = asked.get("min_tokens", 1) or 1  # no more, to be checked
    try:
        params = replace(defaults, **asked)
    except ValueError as error:
        raise APIError(str(error), _param(error, body)) from None
    return Wanted(chat, [_messages(body)] if chat else _prompts(body), params,
                  _template(body) if chat else None, fill, stream, _bool(usage, "include_usage"))


def checked_requests(wanted: Wanted, llm) -> list[Checked]:
    """What an LLM checks before it generates, one request a prompt. Raises APIError for what it
    can never serve."""
    params = wanted.params
    try:
        requests = llm.check(wanted.prompts, params, wanted.template)
    except Closed:
        raise
    except ValueError as error:
        raise APIError(str(error), "messages" if wanted.chat else "prompt") from None
    if not wanted.fill:
        return requests
    most = llm.engine.config.max_model_len + 1  # the last token is never cached
    return [
        request._replace(params=replace(params, max_tokens=most - len(request.token_ids)))
        for request in requests
    ]


def response_body(wanted: Wanted, outputs: Sequence[RequestOutput], response_id: str, model: str,
                  created: int, tokenizer) -> dict[str, Any]:
    """The response to a request whose outputs have ended, one a prompt.

    created: seconds since 1970. Raises APIError where one of them has failed.
    """
    choices = []
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise APIError(f"the request failed: {completion.error}", status=500)
            choice: dict[str, Any] = {"index": len(choices)}
            if wanted.chat:
                choice["message"] = {"role": "assistant", "content": completion.text}
            else:
                choice["text"] = completion.text
            choice["logprobs"] = logprobs_of(completion, wanted, tokenizer)
            choice["finish_reason"] = completion.finish_reason
            choices.append(choice)
    return {
        "id": response_id, "object": "chat.completion" if wanted.chat else "text_completion",
        "created": created, "model": model, "choices": choices, "usage": usage_of(outputs)
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a request's prompts and of all their completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion, "prompt_tokens_details": {"cached_tokens": cached}
    }


def logprobs_of(completion: CompletionOutput, wanted: Wanted, tokenizer,
                start: int = 0) -> dict[str, Any] | None:
    """Log-probabilities of a completion's tokens, from the start-th on, in the form of its path;
    None if none were asked for."""
    if completion.logprobs is None or wanted.params.logprobs is None:
        return None
    most, decoder = wanted.params.logprobs, codecs.getincrementaldecoder("utf-8")("replace")
    rows, offsets, num_characters = [], [], 0
    for token, found in zip(completion.token_ids, completion.logprobs):
        offsets.append(num_characters)
        num_characters += len(decoder.decode(_bytes(token, tokenizer)))
        likeliest = sorted(found, key=lambda other: -found[other])[:most]
        rows.append([_entry(one, found[one], tokenizer) for one in (token, *likeliest)])
    rows = rows[start:]
    if wanted.chat:
        return {"content": [{**own, "top_logprobs": others} for own, *others in rows]}
    return {
        "tokens": [own["token"] for own, *_ in rows],
        "token_logprobs": [own["logprob"] for own, *_ in rows],
        "top_logprobs": [{one["token"]: one["logprob"]
                          for one in others}
                         for _, *others in rows] if most else None, "text_offset": offsets[start:]
    }


def _sampling(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The arguments of SamplingParams that a body names."""
    asked = {name: value for name, value in body.items() if name in SAMPLING}
    longest = body.get("max_completion_tokens")
    if longest is not None and asked.setdefault("max_tokens", longest) != longest:
        raise APIError(
            f"max_tokens is {asked['max_tokens']!r} and max_completion_tokens is "
            f"{longest!r}: they mean the same, give one", "max_completion_tokens")
    if isinstance(asked.get("logit_bias"), dict):  # JSON has no other keys than strings
        try:
            asked["logit_bias"] = {int(token): x for token, x in asked["logit_bias"].items()}
        except ValueError as error:
            raise APIError(f"logit_bias holds what is no token id: {error}", "logit_bias") from None
    name = "top_logprobs" if chat else "logprobs"
    if chat and not _bool(body, "logprobs"):
        if "top_logprobs" in body:
            raise APIError(
                "top_logprobs is given and logprobs is not true: set it, or leave "
                "top_logprobs away", "top_logprobs")
    elif chat or name in body:
        try:
            asked["logprobs"] = whole_number(name, body.get(name, 0), least=0)
        except ValueError as error:
            raise APIError(str(error), name) from None
        if asked["logprobs"] > MOST_LOGPROBS:
            raise APIError(f"{name} is {asked['logprobs']}: it must be at most {MOST_LOGPROBS}",
                           name)
    return asked


def _prompts(body: dict[str, Any]) -> list:
    prompt = body.get("prompt")
    several = [prompt] if isinstance(prompt, str) else prompt
    for kind in (str, int, list):
        if isinstance(several, list) and several and all(type(one) is kind for one in several):
            return [prompt] if kind is int else several
    raise APIError(
        f"prompt is {_short(prompt)}: it must be a string or a list of token ids, or a "
        f"list of these", "prompt")


def _messages(body: dict[str, Any]) -> list:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(
            isinstance(message, dict) for message in messages):
        raise APIError(
            f"messages is {_short(messages)}: it must be a list of messages with role "
            f"and content", "messages")
    return messages


def _template(body: dict[str, Any]) -> dict[str, Any]:
    for name in ("add_generation_prompt", "continue_final_message"):
        _bool(body, name)
    left_out = ("tools",) if body.get("tool_choice") == "none" else ()
    return {name: body[name] for name in sorted(TEMPLATE & body.keys()) if name not in left_out}


def _bool(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise APIError(f"{name} is {_short(value)}: it must be true or false", name)
    return value


def _param(error: ValueError, body: dict[str, Any]) -> str | None:
    """The field that a sentence of SamplingParams is about: "top_p is 3.0: it must be …"."""
    name = str(error).partition(" is ")[0].split()[-1]
    if name == "max_tokens" and name not in body:
        name = "max_completion_tokens"
    return name if name in body else None


def _entry(token: int, logprob: float, tokenizer) -> dict[str, Any]:
    text = _bytes(token, tokenizer)
    return {
        "token": text.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(text)
    }


def _bytes(token: int, tokenizer) -> bytes:
    return f"token_id:{token}".encode() if tokenizer is None else tokenizer.token_bytes(token)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
