"""The icons of the theme as masks of a style sheet, of those that the pages show.

The theme draws its dozen icons with a script that carries two thousand of them. What a page shows
is read out of that script while the book is built, and the script stays away.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pydata_sphinx_theme

SCRIPT = (Path(pydata_sphinx_theme.__file__).parent
          / "theme/pydata_sphinx_theme/static/scripts/fontawesome.js")
ICON = re.compile(r'"?([a-z0-9-]+)"?:\[(\d+),(\d+),\[([^\]]*)\],"[0-9a-f]+",(?:"([^"]+)"|\[)')
USED = re.compile(r'class="[^"]*\b(fa[bsr]?|fa-(?:solid|brands|regular)) fa-([a-z0-9-]+)')
TAG = re.compile(r'<script[^>]*fontawesome\.js[^>]*></script>\n?')
SEARCH = re.compile(r'<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*">'
                    r'</script>\n?')
ALWAYS = {("fa-solid", "xmark")}  # put into a page by the theme's own script
RULES = """
i.fa, i.fas, i.fab, i.far, i.fa-solid, i.fa-brands, i.fa-regular {
  display: inline-block; width: 1.15em; height: 1em; vertical-align: -.125em;
  background: currentColor; -webkit-mask: var(--icon) center / contain no-repeat;
  mask: var(--icon) center / contain no-repeat;
}
i.fa-lg { font-size: 1.25em; vertical-align: -.2em; }
@media (forced-colors: active) {
  i[class*="fa-"] { forced-color-adjust: none; background: ButtonText; }
}
"""


def drawings(script: str) -> dict[str, dict[str, str]]:
    """The drawings of the script by style, fa-brands or fa-solid, and by name or another name."""
    found = {"fa-brands": {}, "fa-solid": {}}
    for icon in ICON.finditer(script):
        name, width, height, aliases, path = icon.groups()
        if path is None:  # of two tones
            continue
        svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
               f'<path d="{path}"/></svg>')
        for known in (name, *re.findall(r'"([a-z0-9-]+)"', aliases)):
            found["fa-brands"].setdefault(known, svg)  # brands come first,
            found["fa-solid"][known] = svg  # solid ones last
    return found


def style_sheet(pages: list[str]) -> str:
    """Rules for the icons of these pages. One that the script does not draw is a KeyError."""
    wanted = set(ALWAYS)
    for page in pages:
        wanted.update(USED.findall(page))
    known, rules = drawings(SCRIPT.read_text(encoding="utf-8")), []
    for style, name in sorted(wanted):
        if name in ("fw", "lg"):
            continue
        svg = known["fa-brands" if style in ("fab", "fa-brands") else "fa-solid"][name]
        rules.append(f'i.{style}.fa-{name} {{ --icon: url("data:image/svg+xml,{quote(svg)}"); }}')
    return RULES + "\n".join(rules) + "\n"


def lighten(app, pagename, templatename, context, doctree):
    """Give the page's template a filter that leaves the icons' script out, and the search's on
    pages that do not search."""

    def without_scripts(text: str) -> str:
        text = TAG.sub("", text)
        return text if pagename == "search" else SEARCH.sub("", text)

    context["without_scripts"] = without_scripts


def write_icons(app, error):
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    pages = [page.read_text(encoding="utf-8") for page in folder.rglob("*.html")]
    # A theme without that script, as Python 3.10 gets it, brings its icons in another way.
    rules = style_sheet(pages) if SCRIPT.exists() else ""
    (folder / "_static" / "icons.css").write_text(rules, encoding="utf-8")


def setup(app):
    app.add_css_file("icons.css")
    app.connect("html-page-context", lighten)
    app.connect("build-finished", write_icons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
