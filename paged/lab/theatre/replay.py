"""A recording replayed: every state, and what the run makes of a beat later."""

from __future__ import annotations

from paged.lab.theatre.deltas import apply

GIVEN_UP = ("KV_BLOCK_RELEASE", "REFERENCE_DROP", "SWAP_OUT")


class Replay:
    """A recording with all its states.

    Attributes:
        states, before: the state after each beat, and before it.
    """

    def __init__(self, recording: dict):
        self.beats, self.words = recording["beats"], recording["words"]
        self.sizes, self.block_size = recording["sizes"], recording["sizes"]["block_size"]
        state: dict = {"requests": {}, "queue": [], "names": {}, "running": []}
        self.states: list[dict] = []
        self.before = [state]
        for beat in self.beats:
            state = apply(state, beat["set"])
            self.states.append(state)
            self.before.append(state)

    def owner(self, index: int, block: int) -> str | None:
        """Whose table this block comes into, at this beat or later."""
        for state in self.states[index:]:
            for name, request in state["requests"].items():
                if block in request["table"] and block not in self.before[index]["requests"].get(
                        name, {"table": ()})["table"]:
                    return name
        return None

    def holders(self, state: dict, block: int) -> list[str]:
        return [
            name for name, r in state["requests"].items()
            if block in r["table"] and r["status"] == "running"
        ]

    def leaving(self, index: int) -> tuple[str, str] | None:
        """(request, what becomes of it), if these references are given up because it leaves."""
        step = self.beats[index]["step"]
        for beat in self.beats[index:]:
            fields = beat["fields"]
            if beat["event"] == "STATE_TRANSITION" and fields["before"] == "running":
                return fields["request"], fields["after"]
            if beat["step"] != step or beat["event"] not in GIVEN_UP:
                return None
        return None
