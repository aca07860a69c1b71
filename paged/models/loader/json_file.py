"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file. Raises ValueError, naming the file, for
    anything but an object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds {type(content).__name__} {str(content)[:20]!r} and not an object: "
            "download it again.")
    return content
