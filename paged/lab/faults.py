"""The deliberate faults of the chapter *How paged engines break*.

Each replaces one method by a wrong one. They stand in the chapter, in the cells tagged `fault`, so
that a reader sees all of them and a notebook needs nothing beyond itself; here they are read from
there, or from the copy of the chapter that an installed package carries.
"""

from __future__ import annotations

import linecache
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

PACKAGE = Path(__file__).resolve().parents[1]
CHAPTERS = (PACKAGE.parent / "book" / "how-engines-break.md",
            PACKAGE / "data" / "how-engines-break.md")
CELL = re.compile(r"```\{code-cell\} ipython3\n:tags: \[fault\]\n(.*?)```\n", re.DOTALL)


@cache
def faults() -> dict[str, tuple]:
    """{name: (class or module, attribute, what replaces it)}. FileNotFoundError without the
    chapter."""
    chapter = next((path for path in CHAPTERS if path.exists()), None)
    if chapter is None:
        raise FileNotFoundError(
            f"the faults stand in {CHAPTERS[0].name}, and there is none: take a "
            "checkout, or install the package with its data")
    namespace = {"FAULTS": {}}
    for code in CELL.findall(chapter.read_text(encoding="utf-8")):
        code, name = code.strip("\n"), re.search(r'FAULTS\["(.*?)"\]', code)
        # Tracebacks, and the theatre, can show the lines.
        filename = f"fault: {name[1] if name else 'set-up'}"
        linecache.cache[filename] = len(code), None, code.splitlines(keepends=True), filename
        exec(compile(code, filename, "exec"), namespace)
    return namespace["FAULTS"]


@contextmanager
def planted(name: str):
    """The package with this fault in it."""
    with patch.object(*faults()[name]):
        yield
