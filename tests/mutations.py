"""The deliberate faults of the chapter *How paged engines break*: the oracle must find them all.

Each replaces one method by a wrong one. They stand in the chapter, in the cells tagged `fault`, so
that a reader sees all of them and a notebook needs nothing beyond itself; here they are read from
there.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

CHAPTER = Path(__file__).parents[1] / "book" / "how-engines-break.md"
CELL = re.compile(r"```\{code-cell\} ipython3\n:tags: \[fault\]\n(.*?)```\n", re.DOTALL)


def _read() -> dict[str, tuple]:
    """{name: (class or module, attribute, what replaces it)}"""
    namespace: dict[str, dict] = {"FAULTS": {}}
    for code in CELL.findall(CHAPTER.read_text(encoding="utf-8")):
        exec(compile(code, str(CHAPTER), "exec"), namespace)
    return namespace["FAULTS"]


MUTATIONS = _read()


@contextmanager
def mutated(name: str):
    """The package with this fault in it."""
    with patch.object(*MUTATIONS[name]):
        yield
