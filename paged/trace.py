"""What happened, as structured events: every module above the tensors reports here, and the book
reads it.

An event is a dict: `step` (the engine's step, 0 before the first), `event` (its name) and what
belongs to it, as plain numbers, strings and lists. The names:

    start-up     MODEL_WEIGHTS_LOADED, KV_BUDGET_ESTIMATE
    blocks       KV_BLOCK_ALLOCATE, KV_BLOCK_REUSE, KV_BLOCK_REACTIVATE, KV_BLOCK_RELEASE,
                 KV_BLOCK_COPY, REFERENCE_DROP (others still hold the block)
    prefixes     PREFIX_REGISTER, PREFIX_FORGET
    a step       SCHEDULE_PREFILL, SCHEDULE_DECODE, PREPARE_PREFILL, PREPARE_DECODE, STEP
    a request    STATE_TRANSITION, ADMISSION_REFUSED, SWAP_OUT, SWAP_IN
    the runner   MOVE, WRITE, READ, SAMPLE, FAILED: only from a recorder (paged.lab.theatre)
"""

from __future__ import annotations

import json
import os
from pathlib import Path


class Trace:
    """A list of events, in the order in which they happened.

    Args:
        limit: events kept; the engine goes on when it is reached, and `dropped` counts what was
            lost. 0 keeps nothing and costs nothing.
    """

    def __init__(self, limit: int = 1_000_000):
        self.limit = limit
        self.step = 0
        self.events: list[dict] = []
        self.dropped = 0

    def emit(self, event: str, **fields) -> None:
        """Record an event under the current step."""
        if not self.limit:
            return
        if len(self.events) < self.limit:
            self.events.append({"step": self.step, "event": event, **fields})
        else:
            self.dropped += 1

    def select(self, *names: str) -> list[dict]:
        """The events with one of these names."""
        return [event for event in self.events if event["event"] in names]

    def lines(self) -> list[str]:
        """One readable line an event."""
        lines = []
        for event in self.events:
            fields = "  ".join(
                f"{key}={value}" for key, value in event.items() if key not in ("step", "event"))
            lines.append(f"{event['step']:>5}  {event['event']:<20} {fields}".rstrip())
        return lines

    def save(self, path: str | os.PathLike) -> None:
        """Write the events as JSON lines; the file appears whole or not at all."""
        write_whole(path, "".join(json.dumps(event) + "\n" for event in self.events))


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a file that appears whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


NO_TRACE = Trace(limit=0)
