"""What the chapters share: plot style, source listings, the check against SDPA, recorded data,
figures.

A colour means one thing in the whole book, in plots and in interactive figures (`COLORS`):

    used      blue     holds tokens of one request; decode in a timeline
    shared    violet   held by more than one request; tokens served from the prefix cache
    free      grey     held by nobody
    reserved  yellow   set aside for tokens that may still come
    internal  orange   wasted inside a block or a reservation: no token will ever lie there
    external  red      wasted between reservations: a hole too small for what waits; anything wrong
    new       green    what this very step touches; prefill in a timeline

The figures need no kernel and no library: data, style and script stand in the cell's output, so the
rendered page, Jupyter and Colab show the same thing.
"""

from __future__ import annotations

import inspect
import itertools
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from IPython.display import HTML, Markdown, display

from paged.lab.colors import COLORS, DARK
from paged.lab.plots import number_of, palette, plot, style

__all__ = ["COLORS", "DARK", "check", "explorer", "plot", "record", "source", "style", "table"]

OPEN = 24  # lines of a listing that stands on the page unfolded


def source(*objects: Callable) -> None:
    """Show the source of functions, methods or classes of the package, each with the file it stands
    in; one of more than `OPEN` lines is folded."""
    for thing in objects:
        function = inspect.unwrap(getattr(
            thing, "fn", thing))  # Triton wraps its kernels, PyTorch its decorated ones.
        lines, start = inspect.getsourcelines(function)
        path = Path(inspect.getfile(function)).relative_to(Path(__file__).parents[2])
        code = f"```python\n{textwrap.dedent(''.join(lines)).rstrip()}\n```"
        if len(lines) > OPEN:
            name = getattr(function, "__qualname__", path.stem)
            code = (f'<details class="listing"><summary><code>{name}</code>, {len(lines)} lines'
                    f"</summary>\n\n{code}\n\n</details>")
        display(Markdown(f"`{path.as_posix()}`, from line {start}:\n\n{code}"))


def check(name: str, got, want, atol: float = 1e-5) -> None:
    """Print in one line whether two tensors (or arrays, or numbers) agree; raise AssertionError if
    not.

    The book calls it with the paged result as `got` and contiguous SDPA as `want`.
    """
    import torch

    got, want = torch.as_tensor(got).detach().cpu().double(), torch.as_tensor(
        want).detach().cpu().double()
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shapes {list(got.shape)} and {list(want.shape)} differ")
    difference = (got - want).abs().max().item() if got.numel() else 0.0
    verdict = f"{name}: largest difference {difference:.1e}, allowed {atol:.0e}"
    if not difference <= atol:  # NaN, too, is a failure.
        raise AssertionError(verdict)
    print(f"✓ {verdict}")


def table(rows: Sequence[Sequence], header: Sequence[str]) -> None:
    """Show rows as a table: thousands separators in ints, four digits of floats, numbers at the
    right."""

    def text(value) -> str:
        if isinstance(value, float):
            return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{value:,}" if isinstance(value,
                                          int) and not isinstance(value, bool) else str(value)

    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    lines = [list(header), ["--:" if right else ":--" for right in numeric], *rows]
    display(
        Markdown("\n".join("| " + " | ".join(text(cell).replace("|", "\\|") for cell in line) + " |"
                           for line in lines)))


def record(name: str) -> dict:
    """A recorded measurement: book/data/<name>.json in a checkout, the copy in the package
    elsewhere.

    Raises FileNotFoundError, with the names there are, for an unknown one.
    """
    package = Path(__file__).resolve().parents[1]
    folders = [package.parent / "book" / "data", package / "data"]
    for path in (folder / f"{name}.json" for folder in folders):
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    names = sorted(path.stem for folder in folders for path in folder.glob("*.json"))
    raise FileNotFoundError(f"no record {name!r}; there are {', '.join(names) or 'none'}")


def interactive(kind: str, title: str, data: dict) -> None:
    """Show lab/figures/<kind>.js over this data; the script there defines `figure(root, data)`."""
    css, common, script = ((files("paged.lab") / "figures" / name).read_text(encoding="utf-8")
                           for name in ("figures.css", "common.js", f"{kind}.js"))
    number = number_of(title)
    payload = json.dumps({"title": title, "number": number, **data}, separators=(",", ":"))
    payload = payload.replace("<", "\\u003c")
    root = f"figure-{number}"
    display(
        HTML(f"""<div class="paged-figure" id="{root}" role="group" aria-label="{escape(title)}">
<noscript>This figure needs JavaScript.</noscript></div>
<style>.paged-figure{{{palette()}}}
{css}</style>
<script>(function () {{
{common}{script}
figure(document.getElementById("{root}"), {payload});
}})();</script>"""))


def explorer(title: str, compute: Callable[..., Mapping[str, Mapping[str, float]]],
             controls: Mapping[str, Sequence[float]], series: Mapping[str, str], unit: str,
             limit: tuple[str, Callable[..., float]] | None = None) -> None:
    """Show stacked bars under sliders; everything is computed now, so that the page needs no
    kernel.

    Args:
        compute: called with one value of each control, in order; returns {bar: {series: amount}},
            the same bars every time.
        controls: label of a slider -> the values it takes.
        series: key of COLORS -> what it stands for, from the left of a bar to its right. The first
            is the useful one: its share of the bar is printed beside it.
        unit: of the amounts.
        limit: what a dashed line across the bars stands for, and its amount for one value of each
            control.
    """
    results = [compute(*values) for values in itertools.product(*controls.values())]
    bars = list(results[0])
    amounts = [[[result[bar].get(key, 0) for key in series] for bar in bars] for result in results]
    interactive(
        "explorer", title, {
            "controls": [{"label": label, "values": list(values)}
                         for label, values in controls.items()],
            "series": [{"color": key, "label": label} for key, label in series.items()],
            "bars": bars, "amounts": amounts, "unit": unit, "limit": limit and {
                "label": limit[0],
                "amounts": [limit[1](*values) for values in itertools.product(*controls.values())]
            }
        })
