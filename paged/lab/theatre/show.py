"""A recording as HTML that needs nothing else: in a notebook, or as a page of its own.

Under the player, and instead of it on paper or without JavaScript, stand the key beats of each run
as pictures, and all its sentences as a list. The player reads its sentences there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from paged.lab.colors import COLORS
from paged.lab.theatre.recorder import states
from paged.lab.theatre.scenes import SCENES, default_model, play


def theatre(*recordings: dict, start: str = "", addresses: bool = True) -> None:
    """Show recordings in a notebook.

    Args:
        recordings: of `Recorder.recording` or `scenes.play`. One with a planted fault belongs to
            the scene with the same slug.
        start: where to open: "fork/17" is that beat of the scene "fork", "fork/MOVE" the first such
            event, and "fork+missing-copy-on-write" the first wrong read under that fault.
        addresses: let the page's address follow the reader; off where a page has several theatres.
    """
    from IPython.display import HTML, display
    wide = len({recording["slug"] for recording in recordings}) > 2
    display(HTML(fragment(recordings, start, addresses, wide=wide)))


def scene(*slugs: str, start: str = "", with_faults: bool = False) -> None:
    """Play scenes of the book with its default model, and show them in a notebook.

    Args:
        slugs: names of `scenes.SCENES`.
        start: as in `theatre`.
        with_faults: also play each scene with its planted faults.
    """
    model = default_model()
    theatre(
        *(play(SCENES[slug], model, fault) for slug in slugs
          for fault in (None, *(SCENES[slug].faults if with_faults else ()))), start=start)


def page(recordings: Sequence[dict], title: str, above: str = "", start: str = "") -> str:
    """A whole HTML page with these recordings; `above` is HTML to stand before them, `start` as in
    `theatre`."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
body {{ margin: 0; padding: 12px; background: light-dark(#fff, #0e1216); }}
.above {{ max-width: 1320px; margin: 0 auto; font: 14px/1.5 system-ui, sans-serif; }}
</style>
</head>
<body>
{above}{fragment(recordings, start, whole_page=True, wide=True)}
</body>
</html>
"""


def fragment(recordings: Sequence[dict], start: str = "", addresses: bool = True,
             whole_page: bool = False, wide: bool = False) -> str:
    """The HTML of a theatre: static part, style, script and data. ValueError without a
    recording."""
    if not recordings:
        raise ValueError("there is nothing to show: give at least one recording")
    css, script = ((files("paged.lab") / "figures" / f"theatre.{kind}").read_text(encoding="utf-8")
                   for kind in ("css", "js"))
    palette = "".join(f"--{name}:{color};" for name, color in COLORS.items())
    sources: dict[str, list[str]] = {}
    scenes = []
    for recording in recordings:
        sources |= recording["sources"]
        scene = {key: value for key, value in recording.items() if key != "sources"}
        scene["beats"] = [{key: value
                           for key, value in beat.items() if key not in ("say", "key")}
                          for beat in recording["beats"]]
        scenes.append(scene)
    data = {
        "scenes": scenes, "sources": sources, "start": _start(recordings, start),
        "addresses": addresses, "page": whole_page
    }
    payload = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    root = f"paged-theatre-{zlib.crc32(payload.encode()):08x}"
    static = "\n".join(_static(recording) for recording in recordings)
    name = "paged-theatre wide" if wide else "paged-theatre"
    return f"""<div class="{name}" id="{root}" role="region" tabindex="0" \
aria-label="The engine, one step seen whole: arrow keys step through it">
<div class="static">
{static}
</div>
</div>
<style>.paged-theatre{{{palette}}}
{css}</style>
<script>(function () {{
{script}
theatre(document.getElementById("{root}"), {payload});
}})();</script>"""


def _start(recordings: Sequence[dict], start: str) -> str:
    """The same place as the player's: "fork/17". ValueError if the run has no such event."""
    address, _, event = start.partition("/")
    if not event or event.isdigit():
        return start
    run = next((r for r in recordings if r["slug"] == address and "fault" not in r), None)
    events = [beat["event"] for beat in run["beats"]] if run else []
    if event not in events:
        raise ValueError(f"start is {start!r}: no run {address!r} with an event {event!r} is shown")
    return f"{address}/{events.index(event) + 1}"


def _static(recording: dict) -> str:
    """A run without a player: its key beats as pictures, its sentences as a list."""
    beats, fault = recording["beats"], recording.get("fault")
    title = recording["title"] + (f", with a planted fault: {fault['name']}" if fault else "")
    figures, before = [], None
    for number, (beat, state) in enumerate(zip(beats, states(recording)), 1):
        if beat.get("key") and not fault:
            figures.append(_figure(recording, number, beat, state, before))
        before = state
    sentences = "".join(f"<li>{escape(beat['say'])}</li>" for beat in beats)
    return (f'<section data-run class="{"plantedrun" if fault else "run"}">'
            f"<h3>{escape(title)}</h3><p>{escape(recording['line'])}</p>{''.join(figures)}"
            f"<details><summary>All {len(beats)} beats</summary><ol>{sentences}</ol></details>"
            "</section>")


def _figure(recording: dict, number: int, beat: dict, state: dict, before: dict | None) -> str:
    """A state as boxes: blocks with what they hold, then the tables and the free queue in words."""
    size, queue = recording["sizes"]["block_size"], state["queue"]
    columns, boxes = min(size, 8), []
    for block, count in enumerate(state["ref"]):
        cells = state["slots"][block * size:(block + 1) * size]
        if not count and not any(cells) and block != (queue or [None])[0]:
            continue
        changed = before is not None and (before["ref"][block] != count or
                                          before["slots"][block * size:(block + 1) * size] != cells)
        kind = ("isfree", "isused", "isshared")[min(count, 2)]
        name = state["names"].get(str(block))
        boxes.append(
            f'<div class="block {kind}{" touch" if changed else ""}"><div class="head">'
            f"<b>block {block}</b>{f'<span class=name>◆ {escape(name)}</span>' if name else ''}"
            f'<span class="held">{_held(state, block)}</span></div>'
            f'<div class="slots" style="grid-template-columns:repeat({columns},minmax(0,1fr))">'
            + "".join(_slot(recording, block * size + i, cell)
                      for i, cell in enumerate(cells)) + "</div></div>")
    tables = "; ".join(f"{name}: {', '.join(map(str, request['table']))}"
                       for name, request in state["requests"].items() if request["table"])
    return (f"<figure><figcaption><b>Beat {number}, step {beat['step']}.</b> {escape(beat['say'])}"
            f'</figcaption><div class="pool" style="--block:{columns * 40 + 4}px">'
            f"{''.join(boxes)}</div><p>Block tables: {escape(tables) or 'none yet'}. Free queue, "
            f"next first: {', '.join(map(str, queue[:24])) or 'empty'}"
            f"{' …' if len(queue) > 24 else ''}.</p></figure>")


def _held(state: dict, block: int) -> str:
    if not state["ref"][block]:
        return "free, next" if state["queue"][0] == block else "free"
    holders = [
        name for name, request in state["requests"].items()
        if block in request["table"] and request["status"] == "running"
    ]
    return "".join(f'<span class="badge">{escape(name)}</span>' for name in holders) or "taken"


def _slot(recording: dict, slot: int, cell: list | None) -> str:
    word = recording["words"][str(cell[0])].replace("\n", "⏎").strip() or "␣" if cell else ""
    return (f'<div class="slot{" full" if cell else ""}"><span class="w">{escape(word)}</span>'
            f'<span class="i">{slot}</span></div>')
