"""Refusals and failures in the form of OpenAI's interface."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from starlette.responses import Response

TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """What is sent back instead of an answer.

    Args:
        status: of HTTP.
        message: a sentence for whoever sent the request.
        param: the field that it is about.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.headers = code, headers

    def body(self) -> dict:
        """{"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": self.message, "type": TYPES.get(self.status, "invalid_request_error"),
                "param": self.param, "code": self.code
            }
        }

    def response(self) -> Response:
        """The whole answer; in ASCII, for it may quote what is no Unicode."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


FORMS = {  # of fields that may be written in several ways
    "prompt": "it must be text, a list of token ids, or a list of either",
    "stop": "it must be a string of at most 1000 characters, or a list of at most 16",
}


def refused(error: ValueError, fields: Collection[str]) -> ApiError:
    """A ValueError of the engine as a 400, about the field that its sentence begins with; a prompt
    may go by the name of messages."""
    message = str(error)
    word = re.match(r"(?:the |an entry of )?(\w+)", message)
    name = word[1] if word else ""
    if name == "prompt" and name not in fields:
        name = "messages"
    code = "context_length_exceeded" if "max_model_len is" in message else "invalid_value"
    return ApiError(400, message, name if name in fields else None, code)


def invalid(errors: Sequence) -> ApiError:
    """What pydantic found wrong with a body: the first of it, without the value."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not place:
        return ApiError(400, "the body is not a JSON object", None, "invalid_json")
    if place[0] in FORMS:
        place = place[:1]
    param = ".".join(place)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is no field that this server knows: leave it away", param,
                        "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    words = FORMS.get(param) or first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {words}", param, "invalid_value")
