"""The picture that a message with a link to a page shows: the title over a pool of blocks and two
requests' tables, dealt out by the package's own pool. A link needs an absolute address, so pages
name it only where the checkout's remote tells theirs.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from paged import BlockPool
from paged.lab.colors import COLORS, DARK, INK

PLACE = "_static/preview.png"
SIZE = 1200, 630  # pixels, the proportion that previews are cut to


def tables() -> tuple[list[list[int]], list[int]]:
    """Block tables of two requests that share their first two blocks, and the reference counts of
    all blocks. Others were there before, so blocks that are handed out lie apart."""
    pool = BlockPool(24)
    pool.allocate(24)
    for step in range(18):
        pool.free([7 * step % 24])
    first = pool.allocate(4)
    assert first is not None
    second = pool.fork(first[:2])
    for table in (second, first, second, first, second):
        added = pool.allocate(1)
        assert added is not None
        table += added
    return [first, second], list(pool.ref_cnt)


def draw(path: Path, title: str) -> None:
    """Write the picture of `SIZE` pixels."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, SIZE[0]), ylim=(SIZE[1], 0))
    axis.axis("off")
    axis.text(70, 70, textwrap.fill(title, 36), fontsize=36, weight="bold", color=DARK, va="top")

    def box(x: float, y: float, width: float, height: float, color: str, label: str) -> None:
        axis.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=7",
                           linewidth=0, facecolor=COLORS[color]))
        axis.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=15,
                  color=DARK if color == "free" else "white")

    requests, counts = tables()
    shared = set(requests[0]) & set(requests[1])
    for row, (name, table) in enumerate(zip("AB", requests)):
        y = 270 + 70 * row
        axis.text(70, y + 25, name, fontsize=22, va="center", color=INK)
        for i, block in enumerate(table):
            box(110 + 70 * i, y, 60, 50, "shared" if block in shared else "used", str(block))
    for block, count in enumerate(counts):
        color = "shared" if count > 1 else "used" if count else "free"
        box(70 + 89 * (block % 12), 440 + 70 * (block // 12), 79, 58, color, str(block))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
