"""Protects what the book says of other engines: book/citations.py finds every issue and every file
that a chapter cites, with a number or a version, so that a later version can be held against it.

What is cited is found here a second time by plain searches that know nothing of the script's
headings. Files that move or names that vanish are found when somebody runs the script over a newer
version.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
import citations

CHAPTERS = sorted((ROOT / "book").glob("*.md"))
ADDRESS = re.compile(r"https://(github\.com/\S+?/(?:issues|pull|advisories)/[\w-]+"
                     r"|arxiv\.org/abs/[\d.]+\d)")
OTHERS = re.compile(r"`([\w/-]+\.(?:py|cu|cuh|h))`")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_every_citation_is_found(chapter):
    lines = chapter.read_text(encoding="utf-8").splitlines()
    found = {(cited.line, cited.place) for cited in citations.citations(chapter)}
    threads = {(number, address)
               for number, line in enumerate(lines, 1)
               for address in ADDRESS.findall(line)}
    assert threads <= found
    for number, line in enumerate(lines, 1):
        for path in OTHERS.findall(line):
            if not line.startswith("**") and not (ROOT / path).exists():
                assert any(at == number and place.endswith(path) for at, place in found), line


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_citation_has_a_version_or_a_number(chapter):
    for cited in citations.citations(chapter):
        if cited.place.startswith("github.com/"):
            assert cited.place.endswith(f"/{cited.version}")
            assert re.fullmatch(r"\d+|GHSA(-\w{4}){3}", cited.version)
        elif cited.project == "arXiv":
            assert cited.place == f"arxiv.org/abs/{cited.version}"
        else:
            assert re.fullmatch(r"\d+\.\d+\.\d+|[0-9a-f]{7}", cited.version), cited


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_an_issue_is_a_link(chapter):
    """A number that a reader cannot follow is not a source."""
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", "", chapter.read_text(encoding="utf-8"))
    assert not re.search(r"\b(?:issues?|pulls?|pull requests?|PR) #?\d", text)
    assert not re.search(r"\b(?:vLLM|SGLang|nano-vllm|PyTorch|flash-attention) #?\d{3,}\b(?!\.)",
                         text)


def test_a_file_without_a_version_is_refused(tmp_path):
    chapter = tmp_path / "chapter.md"
    chapter.write_text("In vLLM 0.33.0 it is\n`vllm/a.py`.\n\nElsewhere `vllm/b.py` does it.\n")
    with pytest.raises(ValueError, match="chapter.md, line 4: .*vllm/b.py"):
        citations.citations(chapter)


def test_forms(tmp_path):
    chapter = tmp_path / "chapter.md"
    chapter.write_text(
        "**vLLM 0.33.0**, under `vllm/v1/`:\n\n"
        "- `core/pool.py`, `Pool.take`,\n  `give`: not `this_name`.\n\n"
        "**nano-vllm bb823b3**, in `nanovllm/config.py`:\n\n- `Config`: sizes.\n\n"
        "So says\n[it](https://github.com/vllm-project/vllm/pull/12), not `paged/a.py`.\n")
    assert citations.citations(chapter) == [
        citations.Citation("vLLM", "0.33.0", "vllm/v1/core/pool.py", ("Pool.take", "give"),
                           "chapter", 3),
        citations.Citation("nano-vllm", "bb823b3", "nanovllm/config.py", ("Config",), "chapter", 8),
        citations.Citation("vLLM", "12", "github.com/vllm-project/vllm/pull/12", (), "chapter", 11)
    ]


def test_what_is_gone_is_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text("class Pool:\n    def take(self): ...\n")
    cited = citations.Citation("vLLM", "1.0.0", "vllm/a.py", ("Pool.take", "Pool.give"), "c", 1)
    assert citations.missing(cited, tmp_path) == ["Pool.give"]
    gone = citations.Citation("vLLM", "1.0.0", "vllm/b.py", ("Pool",), "c", 1)
    assert citations.missing(gone, tmp_path) == ["vllm/b.py"]
