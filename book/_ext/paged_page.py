"""What the pages need beyond Jupyter Book's settings.

Formulas become MathML while the book is built, so that a page needs no math script. No script
stands twice in a page. Chapters run with the package of this checkout, installed or not. The
notebook behind a page's download button installs from the repository, as the one that Colab opens
does.
"""

from __future__ import annotations

import os
import re
import sys
from html import escape
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import preview  # noqa: E402
import repository  # noqa: E402
from sync import install_from_repository  # noqa: E402

logger = logging.getLogger(__name__)


def mathml(latex: str, display: str, node: nodes.Node) -> str:
    """LaTeX as MathML, which browsers draw by themselves; what it cannot say is a build warning."""
    # Its names for two things it can do: aligned lines, and an underscore inside words.
    latex = latex.strip().replace("{aligned}", "{split}")
    latex = re.sub(r"\\text\{[^}]*\}", lambda words: words[0].replace(r"\_", "_"), latex)
    text = latex2mathml.converter.convert(latex, display=display)
    if "\\" in text or "<mi>&</mi>" in text:
        logger.warning("no MathML for this formula: %s", latex, location=node)
    return text


def visit_math(self, node):
    self.body.append(mathml(node.astext(), "inline", node))
    raise nodes.SkipNode


def visit_math_block(self, node):
    label = f' id="equation-{escape(node["label"])}"' if node.get("label") else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    self.body.append(
        f'<div class="formula"{label}>{mathml(node.astext(), "block", node)}{number}</div>\n')
    raise nodes.SkipNode


def drop_scripts(app, pagename, templatename, context, doctree):
    """Drop thebe, which no page uses, and repeated scripts: a second `const` is an error in the
    console."""
    scripts = {}
    for script in context["script_files"]:
        if "thebe" not in str(script).lower():
            scripts[script.filename or script.attributes.get("body", "")] = script
    context["script_files"] = list(scripts.values())


def describe(app, pagename, templatename, context, doctree):
    """What a search engine, or a message with a link to the page, shows of it: its title, its first
    paragraph and, where the pages have an address, a picture."""
    if doctree is None:
        return
    first = next((" ".join(node.astext().split()) for node in doctree.findall(nodes.paragraph)), "")
    title = re.sub("<[^>]*>", "", context.get("title", ""))
    for name, text in (("name", "description"), ("property", "og:description")):
        context["metatags"] += f'\n<meta {name}="{text}" content="{escape(first)}" />'
    context["metatags"] += (f'\n<meta property="og:title" content="{escape(title)}" />'
                            '\n<meta property="og:type" content="article" />')
    home = repository.pages_address(repository.address())
    if home:
        for name, text in (("property", "og:image"), ("name", "twitter:image")):
            context["metatags"] += f'\n<meta {name}="{text}" content="{home}{preview.PLACE}" />'
        context["metatags"] += '\n<meta name="twitter:card" content="summary_large_image" />'


def draw_preview(app, error):
    if not error and app.builder.format == "html" and repository.address():
        preview.draw(Path(app.outdir) / preview.PLACE, app.config.html_title or app.config.project)


def point_at_repository(app, docname, source):
    source[0] = install_from_repository(source[0])


def setup(app):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("html-page-context", drop_scripts, priority=900)
    app.connect("html-page-context", describe)
    app.connect("build-finished", draw_preview)
    app.connect("source-read", point_at_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
