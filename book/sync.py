"""Write the .ipynb of every chapter from its .md: python book/sync.py [--check] [chapter.md ...]

The .md is the source; the .ipynb beside it is what Colab opens. It holds no outputs, and each
cell's id is made from the cell's text, so that an unchanged chapter gives the same file byte for
byte. The install cell of the .md installs the checkout it lies in; in the .ipynb it installs the
repository named in _config.yml.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import jupytext
import nbformat
import yaml

BOOK = Path(__file__).resolve().parent
FROM_CHECKOUT = '"..[notebook]"'


def install_from_repository(text: str) -> str:
    """The text of a chapter with its install cell pointed at the repository of _config.yml."""
    repository = yaml.safe_load(
        (BOOK.parent / "_config.yml").read_text(encoding="utf-8"))["repository"]
    address = f'"paged[notebook] @ git+{repository["url"]}@{repository["branch"]}"'
    return text.replace(FROM_CHECKOUT, address)


def chapters() -> list[Path]:
    """The .md files under book/ that are notebooks: those that name a kernel."""
    return sorted(
        path for path in BOOK.rglob("*.md") if "\nkernelspec:" in path.read_text(encoding="utf-8"))


def notebook_of(chapter: Path) -> str:
    """The text of the .ipynb that belongs to a chapter's .md."""
    notebook = jupytext.reads(install_from_repository(chapter.read_text(encoding="utf-8")),
                              fmt="md:myst")
    notebook.metadata.pop("jupytext", None)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = f"{digest}-{seen[digest]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook) + "\n"


def main(arguments: list[str]) -> int:
    """Sync the named chapters, or all; with --check only say which are out of step (exit status
    1)."""
    check = "--check" in arguments
    names = [argument for argument in arguments if argument != "--check"]
    stale = 0
    for chapter in [Path(name).resolve() for name in names] or chapters():
        target, text = chapter.with_suffix(".ipynb"), notebook_of(chapter)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            stale += 1
            print(
                f"{target.name} {'is out of step: run python book/sync.py' if check else 'written'}"
            )
            if not check:
                target.write_text(text, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
