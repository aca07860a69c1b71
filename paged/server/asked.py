"""Between a body and the engine, wherever the body came from: what it asks as requests, and what
came of them as its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from paged.call import Checked
from paged.llm import LLM
from paged.prompts import read_prompt
from paged.request import RequestOutput
from paged.server.answers import Answer, TokenBytes
from paged.server.errors import ApiError, invalid, refused
from paged.server.fields import Body, ChatBody, CompletionBody

BODIES: dict[str,
             type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}


def read(path: str, given: Any) -> Body:
    """The body of a request to a path of BODIES. Raises ApiError."""
    try:
        return BODIES[path].model_validate(given)
    except ValidationError as error:
        raise invalid(error.errors()) from None


def check_model(body: Body, model: str) -> None:
    """Raises ApiError for a request to another model."""
    if body.model != model:
        raise ApiError(404, f"there is no model {body.model!r} here: this server has {model!r}",
                       "model", "model_not_found")


def checked(llm: LLM, body: Body, prompt, salt: str | None = None) -> Checked:
    """One of its prompts as a request that can be served. Raises ApiError."""
    try:
        text, ids = read_prompt(prompt, llm.tokenizer, **body.template_options)
        config = llm.engine.config
        params = body.params(llm.default_sampling_params, config.max_model_len, len(ids))
        return Checked(text, llm.engine.check_request(ids, params), params, salt)
    except ValueError as error:
        raise refused(error, type(body).model_fields) from None


def answer_of(llm: LLM, body: Body, model: str, requests: Sequence[Checked]) -> Answer:
    """The answer to a body, to be filled with what comes of its requests. Raises ApiError."""
    chat = isinstance(body, ChatBody)
    echo = isinstance(body, CompletionBody) and body.echo
    return Answer(chat, model, _token_bytes(llm, body), body.likeliest, body.n,
                  _texts(llm, requests) if echo else None, echo and body.max_tokens == 0)


def check_end(output: RequestOutput) -> None:
    """Raises ApiError for a request that failed, or that somebody else has ended."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise ApiError(500, f"the engine has failed at this request: {completion.error}", None,
                           "engine_failed")
        if completion.finish_reason == "abort":
            raise ApiError(503, "the request was aborted before its end", None, "aborted")


def _token_bytes(llm: LLM, body: Body) -> TokenBytes | None:
    """The bytes of a token as text, and as a name, which special tokens have too."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return None
    skip = body.skip_special_tokens is not False
    return lambda token, name=False: tokenizer.token_bytes(token, skip and not name)


def _texts(llm: LLM, requests: Sequence[Checked]) -> list[str]:
    """The texts of prompts, those of token ids too."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model came without a tokenizer: it cannot echo text", "echo",
                       "unsupported_parameter")
    return [
        tokenizer.decode(request.token_ids)
        if request.prompt is None or request.params.truncate_prompt_tokens else request.prompt
        for request in requests
    ]
