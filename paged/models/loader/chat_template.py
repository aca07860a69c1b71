"""Chat templates: Jinja programs that write a conversation as the text a model was trained on.

They are rendered as transformers renders them (`apply_chat_template`): its block and line rules,
its functions and filters, its `{% generation %}` tag, its variables.
"""

from __future__ import annotations

import copy
import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

OURS = ("messages", "tools", "documents", "add_generation_prompt")  # variables that we set
END = "\ue001end of the text to continue\ue001 "
"""Marks where a message ends that is to be continued; the space shows whether a template trims."""


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: what the model writes, for training. Here, its body,
    in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller) -> str:
        return caller()


def render(template: str, messages: list[dict[str, Any]], named_tokens: dict[str, str],
           tools: list[dict[str, Any]] | None, documents: list[dict[str, Any]] | None,
           add_generation_prompt: bool, variables: dict[str, Any]) -> str:
    """The text of a conversation. Raises ValueError where the template objects or fails."""
    try:
        return _compiled(template).render(messages=messages, tools=tools, documents=documents,
                                          add_generation_prompt=add_generation_prompt,
                                          **named_tokens | variables)
    except Exception as error:  # a template is a program, and may fail as any program does
        raise ValueError(
            f"The model's chat template cannot render these messages: {error}") from error


def render_flat(template: str, messages: list[dict[str, Any]], *arguments) -> str:
    """As `render`, for contents that may be lists of text parts.

    A template that knows parts gets them. Any other would print the list, or pass over it: it gets
    the texts, one a line, as in vLLM.
    """
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    if not lists:
        return render(template, messages, *arguments)
    try:
        text = render(template, messages, *arguments)
    except ValueError:
        text = None
    if text is not None and all(
            part["text"].strip() in text for parts in lists for part in parts) and not any(
                printed in text for parts in lists
                for printed in (str(parts), json.dumps(parts, ensure_ascii=False))):
        return text
    return render(template, [_flat(message) for message in messages], *arguments)


def render_continued(template: str, messages: list[dict[str, Any]], *arguments) -> str:
    """As `render_flat`, up to where the last message's text ends, so that the model goes on with
    it."""
    messages = copy.deepcopy(messages)
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        final = content[-1]["text"]
        content[-1]["text"] = final + END
    elif isinstance(content, str):
        final = content
        messages[-1]["content"] = final + END
    else:
        raise ValueError("There is no text in the last message that could be continued.")
    text = render_flat(template, messages, *arguments)
    if final.strip() not in text or END.strip() not in text:
        raise ValueError("The last message cannot be continued: the model's chat template does not "
                         "write it as it is.")
    at = text.rindex(END.strip())
    trimmed = text[at:at + len(END)] != END
    return text[:at].rstrip() if trimmed else text[:at]


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return message
    return message | {"content": "\n".join(part["text"] for part in message["content"])}


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter writes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
