"""The terms of book/terms.yml as entries of the index, at the sections that explain them.

Sphinx's search ranks an entry of the index above every mention, and opens the page at its place.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

TERMS = Path(__file__).resolve().parents[1] / "terms.yml"
logger = logging.getLogger(__name__)


class IndexTerms(SphinxTransform):
    """Enters a page's terms into the index. A heading that is not there is a build warning."""

    default_priority = 800  # before Sphinx collects the entries of the page

    def apply(self) -> None:
        folder, _, page = self.env.docname.rpartition("/")
        if folder != "book":
            return
        self.env.note_dependency(str(TERMS))
        wanted = yaml.safe_load(TERMS.read_text(encoding="utf-8")).get(page, {})
        sections = {}
        for section in self.document.findall(nodes.section):
            sections.setdefault(section[0].astext(), section)
        for heading, terms in wanted.items():
            if heading not in sections:
                logger.warning("book/terms.yml: %s has no section %r", page, heading)
                continue
            section = sections[heading]
            entries = [("single", term, section["ids"][0], "main", None) for term in terms]
            section.insert(1, addnodes.index(entries=entries))


def setup(app):
    app.add_transform(IndexTerms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
