"""List what the chapters cite of other projects: python book/citations.py [--tree PROJECT=FOLDER]

A line for every file with its project, version and names, for every issue, pull request and
advisory with its number, and for every paper on arXiv; each with its chapter and line. When a newer
version is out, unpack it and name the folder: --tree, which may be repeated, then marks files and
names that are no longer there, and the exit status is 1. What an issue says a person has to read
again.

A file is cited as `path/to/file.py` in a sentence that names project and version, or in a list
under **project version**, under `folder/`: with the names it stands for before the first colon.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOOK = Path(__file__).resolve().parent
VERSION = (r"(?P<project>vLLM|SGLang|nano-vllm|FlashInfer|FlashAttention|PyTorch) "
           r"(?P<version>\d+(?:\.\w+)+|[0-9a-f]{7})\b")
HEADING = re.compile(rf"\*\*{VERSION}\*\*(?:, (?:under|in) `(?P<path>[^`]+)`)?")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w/-]+\.(?:py|cuh?|h)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
OURS = ("paged/", "book/", "practice/", "tests/")
THREAD = re.compile(r"github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull|security/advisories)/([\w-]+)")
PAPER = re.compile(r"arxiv\.org/abs/(\d{4}\.\d{4,5})")
PROJECTS = {"vllm": "vLLM", "sglang": "SGLang", "pytorch": "PyTorch", "xllm": "xLLM"}


@dataclass(frozen=True)
class Citation:
    """A file of a project, a thread of its tracker or a paper, and where a chapter cites it."""

    project: str
    version: str  # of a thread or a paper: its number
    place: str  # a path, or an address without https://
    names: tuple[str, ...]  # classes and functions cited from a file
    chapter: str
    line: int


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a chapter, each with the line on which it begins."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if lines and (not line.strip() or line.startswith("- ")):
            yield number - len(lines), "\n".join(lines)
            lines = []
        if line.strip():
            lines.append(line)


def citations(chapter: Path) -> list[Citation]:
    """All of a chapter's in its order. A file without a project and a version is a ValueError."""
    found = []
    heading = None
    for start, text in blocks(chapter.read_text(encoding="utf-8")):
        opened = HEADING.match(text)
        heading = opened or (heading if text.startswith("- ") else None)
        said = heading or re.search(VERSION, text)
        for place, names, offset in [] if opened else files(text, heading):
            line = start + text[:offset].count("\n")
            if said is None:
                raise ValueError(f"{chapter.name}, line {line}: of which project, and of which "
                                 f"version, is {place}?")
            found.append(
                Citation(said["project"], said["version"], place, names, chapter.stem, line))
        for thread in THREAD.finditer(text):
            project = PROJECTS.get(thread[2].lower(), thread[2])
            found.append(
                Citation(project, thread[3], thread[0], (), chapter.stem,
                         start + text[:thread.start()].count("\n")))
        for paper in PAPER.finditer(text):
            found.append(
                Citation("arXiv", paper[1], paper[0], (), chapter.stem,
                         start + text[:paper.start()].count("\n")))
    return found


def files(text: str, heading: re.Match | None) -> list[tuple[str, tuple[str, ...], int]]:
    """The files that one paragraph or list item cites: (path, names, offset in the text).

    Of a list item, the names that count stand before its first colon. Where the heading names a
    file, its items cite parts of that file.
    """
    folder = heading["path"] or "" if heading else ""
    cited = [(folder, [], 0)] if FILE.fullmatch(folder) else []
    end = text.find(": ") if heading else -1
    for code in CODE.finditer(text):
        if FILE.fullmatch(code[1]) and not code[1].startswith(OURS):
            cited.append((folder + code[1], [], code.start()))
        elif heading and cited and NAME.fullmatch(code[1]) and (end < 0 or code.start() < end):
            cited[-1][1].append(code[1])
    return [(place, tuple(names), offset) for place, names, offset in cited]


def missing(citation: Citation, folder: Path) -> list[str]:
    """What of a cited file is not in an unpacked project: the file itself, or names in it."""
    found = [
        path for path in folder.rglob(Path(citation.place).name)
        if path.as_posix().endswith(f"/{citation.place}")
    ]
    if not found:
        return [citation.place]
    words = set(re.findall(r"\w+", found[0].read_text(encoding="utf-8")))
    return [name for name in citation.names if not words.issuperset(name.split("."))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python book/citations.py",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], metavar="PROJECT=FOLDER",
                        help="look this project's files up in an unpacked version of it")
    trees = dict(tree.split("=", 1) for tree in parser.parse_args(arguments).tree)
    gone = 0
    for chapter in sorted(BOOK.glob("*.md")):
        for cited in citations(chapter):
            lookup = cited.project in trees and bool(FILE.fullmatch(cited.place))
            lost = missing(cited, Path(trees[cited.project])) if lookup else []
            gone += len(lost)
            print(f"{cited.chapter}.md:{cited.line}", f"{cited.project} {cited.version}",
                  cited.place, *cited.names, *(f"NOT THERE: {name}" for name in lost), sep="  ")
    return int(gone > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
