"""Plots of the chapters: drawn by matplotlib, shown as SVG that follows the page.

`plot` puts the current figure into the cell's output with a number, a caption, and a sentence for
those who cannot see it. The colours of the book become CSS variables, so that text and lines have
their contrast in a light page as in a dark one, on paper, and under a system's own colours.
"""

from __future__ import annotations

import io
import itertools
import re
from html import escape
from importlib.resources import files

from IPython.display import HTML, display

from paged.lab.colors import COLORS, INK, INKS

_numbers: dict[str, int] = {}
_next = itertools.count(1)
STRIPES = ('<pattern id="{}-stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
           'patternTransform="rotate(45)"><rect width="6" height="6" style="fill: var(--shared)"/>'
           '<rect width="2" height="6" style="fill: #000; fill-opacity: 0.3"/></pattern>')
_TEXT = re.compile(r'<g style="fill: (#[0-9a-f]{6})')


def style() -> None:
    """Make matplotlib draw for this book: no background, the book's colours in their order."""
    import matplotlib
    from cycler import cycler
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("svg")
    matplotlib.rcParams.update({
        "figure.figsize": (6.6, 3.3),
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "paged",
        "font.size": 10.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.titlesize": 11.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": COLORS["free"],
        "grid.alpha": 0.3,
        "lines.linewidth": 2,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=[COLORS[name] for name in COLORS if name != "free"]),
    })


def number_of(what: str) -> int:
    """The number of a figure in its chapter. A cell that runs again keeps the one it had."""
    if what not in _numbers:
        _numbers[what] = next(_next)
    return _numbers[what]


def palette() -> str:
    """The book's colours as declarations of CSS."""
    return "".join(f"--{name}:{color};" for name, color in COLORS.items())


def themed(svg: str, prefix: str) -> str:
    """A drawing of matplotlib's with CSS variables for the book's colours, and ids of its own."""
    svg = svg[svg.index("<svg"):]
    # Its own <style> would hold for the whole page: plot.css has what it says.
    for extra in ("<metadata>.*?</metadata>", "<!--.*?-->", "<style.*?</style>"):
        svg = re.sub(rf"\s*{extra}", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    inks = {color: name for name, color in COLORS.items()} | {INK: "plot"}
    # matplotlib sets the colour of a text, and of nothing else, at a group.
    svg = _TEXT.sub(
        lambda found: (f'<g style="fill: var(--{inks[found[1]]}-ink)'
                       if found[1] in inks else found[0]), svg)
    for name, color in [*COLORS.items(), ("plot-ink", INK)]:
        svg = svg.replace(color, f"var(--{name})")
    # What is shared can be told from what is used without the colour: lines have dashes, dots are
    # rings, areas have stripes.
    svg = re.sub(r'(style="fill: none; )(stroke: var\(--shared\))', r"\1stroke-dasharray: 7 4; \2",
                 svg)
    svg = re.sub(r'(<use [^>]*style=")fill: var\(--shared\)(?!; stroke)[^"]*',
                 r"\1fill: none; stroke: var(--shared)", svg)
    striped = re.sub(r'(<(?:path|use) [^>]*style="fill: )var\(--shared\)',
                     rf"\1url(#{prefix}-stripes)", svg)
    return striped.replace("<defs>", f"<defs>{STRIPES.format(prefix)}",
                           1) if striped != svg else svg


def plot(shows: str, caption: str) -> None:
    """Show the current figure of matplotlib.

    Args:
        shows: what there is to see, for those who do not see it: what is drawn over what, and what
            it says.
        caption: below the figure, behind its number. `code` may stand in it.
    """
    import matplotlib.pyplot as plt

    figure = plt.gcf()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    width = figure.get_figwidth() * 96
    plt.close(figure)
    number = number_of(shows)
    root = f"figure-{number}"
    tag = (f'<svg role="img" aria-label="{escape(shows)}" '
           f'style="width: {width:.0f}px"')
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        lambda found: f'{tag} {found[1]} xmlns:xlink="http://www.w3.org/1999/xlink" '
        'xmlns="http://www.w3.org/2000/svg">', themed(out.getvalue(), root), count=1)
    words = re.sub("`(.*?)`", r"<code>\1</code>", escape(caption))
    light, dark = ("".join(f"--{name}-ink:{pair[i]};" for name, pair in INKS.items())
                   for i in (0, 1))
    css = (files("paged.lab") / "figures" / "plot.css").read_text(encoding="utf-8")
    css = css.replace("/*light*/", palette() + light).replace("/*dark*/", dark)
    display(
        HTML(f'<figure class="paged-plot" id="{root}"><style>{css}</style>'
             f'<div class="wide" tabindex="0" role="group" aria-label="Figure {number}">{svg}</div>'
             f'<figcaption><a href="#{root}">Figure {number}</a>. {words}</figcaption></figure>'))
