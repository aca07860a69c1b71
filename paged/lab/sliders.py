"""Figures of the chapters in which something is dragged: a position, a tile, the sizes of an
engine.

All that a slider can show is computed here, so that the page needs no kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from paged.lab.notebook import interactive
from paged.metrics import steps, timeline
from paged.trace import Trace


def slot_finder(title: str, tokens: int, rows: int, tables: Mapping[int, Sequence[int]],
                at: int) -> None:
    """Show the way from a position of a request through its block table to a slot.

    Args:
        tokens: of the request.
        rows: of the cache.
        tables: block size -> the block table of the request.
        at: the block size that is shown first.
    """
    for size, table in tables.items():
        if len(table) != -(-tokens // size) or not all(0 <= b < rows // size for b in table):
            raise ValueError(f"{tokens} tokens in blocks of {size} of {rows} rows cannot have the "
                             f"table {list(table)}")
    interactive(
        "slots", title, {
            "tokens": tokens, "rows": rows, "at": list(tables).index(at),
            "sizes": [{"size": size, "table": list(table)} for size, table in tables.items()]
        })


def online_softmax(title: str, scores: Sequence[float], values: Sequence[Sequence[float]],
                   tile: int) -> None:
    """Show the attention of one query over tiles: its maximum, its sums and their correction.

    Args:
        scores: [tokens], of the query with each key.
        values: [tokens, head_dim].
        tile: tokens that are seen at once.
    """
    width = range(len(values[0]))
    m, l, acc = -math.inf, 0.0, [0.0 for _ in width]
    shown = [{"m": None, "alpha": 0.0, "l": l, "acc": acc, "out": None}]
    for start in range(0, len(scores), tile):
        seen = range(start, min(start + tile, len(scores)))
        m_new = max(m, *(scores[i] for i in seen))
        alpha = math.exp(m - m_new)
        p = {i: math.exp(scores[i] - m_new) for i in seen}
        l = l * alpha + sum(p.values())
        acc = [alpha * acc[d] + sum(p[i] * values[i][d] for i in seen) for d in width]
        m = m_new
        shown.append({"m": m, "alpha": alpha, "l": l, "acc": acc, "out": [a / l for a in acc]})
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    want = [sum(w * row[d] for w, row in zip(weights, values)) / sum(weights) for d in width]
    interactive("softmax", title,
                {"tile": tile, "scores": list(scores), "steps": shown, "want": want})


def lanes(trace: Trace, names: Sequence[str]) -> list[list[list]]:
    """What each request did, step after step, as runs of [kind, steps]: "" is not there, "free"
    waits, "new" computes its prompt, "used" decodes, "external" is put back."""
    last = len(steps(trace))
    kinds: dict[str, list[str]] = {name: [""] * (last + 1) for name in names}
    for event in trace.select("STATE_TRANSITION"):
        lane, step = kinds[event["request"]], event["step"]
        ended = event["after"] == "finished"
        lane[step + 1:] = ["" if ended else "free"] * (last - step)
        if event["before"] == "running" and event["after"] in ("waiting", "swapped"):
            lane[step] = "external"
        elif event["before"] != "running":
            lane[step] = "free"
    for row in timeline(trace):
        if kinds[row["request"]][row["step"]] != "external":
            kinds[row["request"]][row["step"]] = "new" if row["phase"] == "prefill" else "used"
    return [[[kind, len(list(run))] for kind, run in itertools.groupby(lane[1:])]
            for lane in kinds.values()]


def request_timeline(title: str, run: Callable[..., Trace], controls: Mapping[str, Sequence[int]],
                     names: Sequence[str]) -> None:
    """Show requests over steps, the tokens of each step and the blocks in use, for sizes of an
    engine.

    Args:
        run: called with a budget, a number of seats and one of blocks; returns the trace.
        controls: label of a slider -> the values it takes; three, in the order of `run`.
        names: of the requests, in the order of their rows.
    """
    runs, longest = [], 0
    for budget, seats, blocks in itertools.product(*controls.values()):
        trace = run(budget, seats, blocks)
        rows = steps(trace)
        computed = [row["prefill"] + row["decode"] for row in rows]
        longest = max(longest, len(rows))
        back = sum(row["preempted"] for row in rows)
        runs.append({
            "requests": lanes(trace, names), "tokens": computed,
            "used": [row["used"] for row in rows], "budget": budget, "blocks": blocks,
            "said": f"{len(rows)} steps compute {sum(computed):,} tokens, "
            f"{sum(computed) / len(rows) / budget:.0%} of their budget; " +
            (f"{back} times a request is put back." if back else "nobody is put back.")
        })
    interactive(
        "timeline", title, {
            "controls": [{"label": label, "values": list(values)}
                         for label, values in controls.items()], "steps": longest, "runs": runs
        })
