"""Conversations as they should be, or one sentence that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
WORDS = (*ROLES, "text")  # what a role or a type may be that templates go by


def check_conversation(messages: Any) -> None:
    """Raise ValueError for what is no list of messages, and for text that is no Unicode."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            "A conversation is a list of at least one message, each a dict with 'role' and "
            f"'content'; got {messages!r}.")
    for i, message in enumerate(messages):
        calls = isinstance(message, dict) and message.get("tool_calls")
        if not isinstance(message, dict) or "role" not in message or not (calls
                                                                          or "content" in message):
            raise ValueError(
                f"Message {i} must be a dict with 'role' and 'content'; got {message!r}.")
        if message["role"] not in ROLES:
            raise ValueError(
                f"Message {i} has the role {message['role']!r}; known are {', '.join(ROLES)}.")
        content = message.get("content")
        if not (isinstance(content, str) or _are_texts(content) or content is None and calls):
            raise ValueError(f"The content of message {i} must be a string, or a list of "
                             f"{{'type': 'text', 'text': ...}}; got {content!r}.")
        rewrite(message, partial(check_text, f"The content of message {i}"))


def check_objects(name: str, values: Any) -> None:
    """Raise ValueError for tools or documents that are no dicts in a list."""
    if values is None:
        return
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{name} is {values!r}: it must be a list of dicts.")
    rewrite(values, partial(check_text, f"A text in {name}"))


def check_text(name: str, text: str) -> str:
    """The text; ValueError for halves of surrogate pairs: what bytes that are not UTF-8 become on a
    command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode at character {error.start} ({text[error.start]!r}): give "
            "it in UTF-8.") from None
    return text


def rewrite(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a message, or of anything made of dicts and lists, with its texts changed, keys
    too; what has to be one of a few words stays. The parts of a content are changed as the one text
    that they may become, so `change` has to keep lengths."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            rewrite(key, change): part if key in ("role", "type") and part in WORDS else rewrite(
                part, change)
            for key, part in value.items()
        }
    if _are_texts(value):
        whole, parts = change("".join(part["text"] for part in value)), []
        for part in value:
            parts.append(part | {"text": whole[:len(part["text"])]})
            whole = whole[len(part["text"]):]
        return parts
    if isinstance(value, (list, tuple)):
        return [rewrite(part, change) for part in value]
    return value


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(
        isinstance(part, dict) and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str) for part in content)
