"""A file of requests in OpenAI's batch format, a line each:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": …}}

A line that is none gets its error as its result, and the others go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

PATHS = ("/v1/chat/completions", "/v1/completions")
KEYS = ("custom_id", "method", "url", "body")


class Line(NamedTuple):
    """A line of the file.

    Attributes:
        number: counted from 1, blank lines too.
        id: of its result: the number and a hash of the line, so that a file of results can be held
            against the file of requests that it was made from.
        problem: what is wrong with it; None where it has the form above.
    """

    number: int
    id: str
    custom_id: str | None = None
    path: str = ""
    body: Any = None
    problem: str | None = None


def read_requests(path: str | Path) -> Generator[Line, None, None]:
    """The lines of a file that are not blank, one after the other."""
    first: dict[str, int] = {}  # line of each custom_id
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield _read(number, raw, first)


def _read(number: int, raw: bytes, first: dict[str, int]) -> Line:
    line = Line(number, f"{number}-{hashlib.sha256(raw.strip()).hexdigest()[:12]}")
    try:
        found = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return line._replace(problem=f"line {number} is no JSON: {error}")
    if not isinstance(found, dict):
        return line._replace(problem=f"line {number} is no JSON object")
    name = found.get("custom_id")
    if not isinstance(name, str) or not name:
        return line._replace(
            problem=f"custom_id of line {number} is {name!r}: it must be a string, not empty")
    line = line._replace(custom_id=name, path=str(found.get("url")), body=found.get("body"))
    if first.setdefault(name, number) != number:
        problem = f"custom_id {name!r} of line {number} is that of line {first[name]} already"
    elif set(found) - set(KEYS):
        problem = f"line {number} has {', '.join(sorted(set(found) - set(KEYS)))} beside {KEYS}"
    elif found.get("method") != "POST":
        problem = f"method of line {number} is {found.get('method')!r}: it must be 'POST'"
    elif line.path not in PATHS:
        problem = f"url of line {number} is {line.path!r}: it must be {' or '.join(PATHS)}"
    else:
        return line
    return line._replace(problem=problem)
