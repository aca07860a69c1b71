"""A file that a chapter names is a link: one of this repository to a page with its source, one of
another engine to the cited version on GitHub.

The pages are made of the checkout that the book is built from, so lines are where the book says.
Which version of another engine is meant, book/citations.py knows.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import citations  # noqa: E402

FOLDERS = ("paged/", "book/", "practice/", "tests/")
SUFFIXES = (".py", ".js", ".md", ".yml", ".toml")
LINE = re.compile(r", from line (\d+)")
PLACES = {
    "vLLM": "https://github.com/vllm-project/vllm/blob/v{version}/{place}",
    "SGLang": "https://github.com/sgl-project/sglang/blob/v{version}/python/{place}",
    "nano-vllm": "https://github.com/GeeeekExplorer/nano-vllm/blob/{version}/{place}",
    "FlashInfer": "https://github.com/flashinfer-ai/flashinfer/blob/v{version}/{place}",
    "FlashAttention": "https://github.com/Dao-AILab/flash-attention/blob/v{version}/{place}",
    "PyTorch": "https://github.com/pytorch/pytorch/blob/v{version}/{place}"
}


def ours(text: str) -> bool:
    """Whether a name is that of a text file of this repository."""
    return text.startswith(FOLDERS) and text.endswith(SUFFIXES) and (ROOT / text).is_file()


def cited(text: str, found: list[citations.Citation]) -> str | None:
    """The address of another engine's file, and of the first citation that names it so.

    The citation is taken out of the list, as long as another one of the same name follows.
    """
    fitting = [c for c in found if c.place == text or c.place.endswith(f"/{text}")]
    if not fitting or fitting[0].project not in PLACES:
        return None
    if len(fitting) > 1:
        found.remove(fitting[0])
    first = fitting[0]
    address = PLACES[first.project]
    if "." not in first.version:  # a commit
        address = address.replace("/v{version}/", "/{version}/")
    return address.format(version=first.version, place=first.place)


class FileLinks(SphinxPostTransform):
    """Makes links of literals that are names of files."""

    default_priority = 500  # when the outputs of cells have become text
    formats = ("html",)

    def run(self, **kwargs) -> None:
        docname = self.env.docname
        path = Path(self.env.doc2path(docname))
        chapter = path.parent == ROOT / "book" or path.parent.name == "book"
        found = citations.citations(path) if chapter and path.suffix == ".md" else []
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if isinstance(literal.parent, nodes.reference):
                continue
            if ours(text):
                page = f"source/{text}"
                wanted = self.app.config.source_pages
                wanted.add(text)
                target: str | None = self.app.builder.get_relative_uri(docname, page)
                after = literal.next_node(descend=False, siblings=True)
                line = LINE.match(after.astext()) if isinstance(after, nodes.Text) else None
                if line:
                    target = f"{target}#L-{line[1]}"
            else:
                target = cited(text, found) if citations.FILE.fullmatch(text) else None
            if target:
                link = nodes.reference("", "", literal.deepcopy(), refuri=target,
                                       internal=ours(text))
                literal.replace_self(link)


def source_pages(app):
    """A page for each file that is named somewhere."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", wrapcode=True)
    for name in sorted(app.config.source_pages):
        text = (ROOT / name).read_text(encoding="utf-8")
        code = highlight(text, get_lexer_for_filename(name, stripnl=False), formatter)
        yield (f"source/{name}", {
            "title": name, "body": f"<h1><code>{escape(name)}</code></h1>{code}"
        }, "page.html")


def setup(app):
    app.add_config_value("source_pages", set(), "")
    app.add_post_transform(FileLinks)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
