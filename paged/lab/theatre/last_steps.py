"""A recorder for an engine that never ends: it keeps the last steps and what they need.

    recorder = LastSteps(50)
    llm.owner.do(recorder.watch, llm.engine)
    ...
    recording = recorder.told(llm.owner.do(recorder.copied, "Now", "", "now"))
"""

from __future__ import annotations

from paged.engine import Engine
from paged.lab.theatre.deltas import apply, delta
from paged.lab.theatre.memory import Moves
from paged.lab.theatre.recorder import Recorder

MOST_BLOCKS = 4096  # every event copies what the engine knows of each of them


class LastSteps(Recorder):
    """Records the last steps, in memory that does not grow with those before.

    A recording begins with a beat of its own, KEPT: the state before the first step that is kept.
    Of the memory it reads the slots that a step has written or moved; `Recorder` reads all.

    Args:
        steps: kept.
    """

    def __init__(self, steps: int):
        super().__init__(limit=1)  # beats hold the events: the list of them needs no more
        self.steps = steps
        self._before: dict = {}  # the state before the first beat that is kept
        self._dropped = False  # whether there were beats before it

    def watch(self, engine: Engine) -> None:
        """As a Recorder does. Raises ValueError for a pool that is too large to be looked at."""
        num_blocks = engine.config.num_blocks
        if num_blocks > MOST_BLOCKS:
            raise ValueError(f"the pool has {num_blocks} blocks, and the theatre shows at most "
                             f"{MOST_BLOCKS}: set --num-blocks, or leave --theatre out")
        super().watch(engine)
        self._before = self._state = self._capture("KEPT", {})

    def _beat(self, event: str, fields: dict, at: list[int]) -> None:
        super()._beat(event, fields, at)
        last = self.step - self.steps  # it, and those before, are dropped
        old = next((i for i, beat in enumerate(self.beats) if beat["step"] > last), 0)
        if not old:
            return
        for beat in self.beats[:old]:
            self._before = apply(self._before, beat["set"])
        del self.beats[:old]
        self._dropped = True
        for name in self._ended():
            self._known.pop(name, None)
            self._cached.pop(name, None)

    def _ended(self) -> set[str]:
        """Requests that had ended before the first step that is kept."""
        requests = self._before["requests"]
        return {name for name, request in requests.items() if request["status"] == "finished"}

    def _kept(self) -> list[dict]:
        ended = self._ended()
        requests = {n: r for n, r in self._before["requests"].items() if n not in ended}
        first = {
            "step": self.beats[0]["step"] if self.beats else self.step, "event": "KEPT",
            "fields": {"steps": self.steps, "dropped": self._dropped}, "at": [], "set": delta(
                {}, self._before | {"requests": requests})
        }
        return [first] + [beat | {"set": _without(beat["set"], ended)} for beat in self.beats]

    def _shown(self, beats: list[dict]) -> set[int]:
        left = [cell[0] for cell in self._before["slots"] if cell is not None]  # by those who ended
        left += [token for token in self._before["host"] if token is not None]
        return super()._shown(beats) | set(left)

    def _looked_at(self, moves: Moves) -> list[int]:
        return sorted(set(moves.slots))


def _without(change: dict | None, names: set[str]) -> dict | None:
    """A change of the state, without what it changes of these requests."""
    if change is None or "requests" not in change:
        return change
    left = {name: new for name, new in change["requests"].items() if name not in names}
    return change | {"requests": left}
