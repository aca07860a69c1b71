"""A runner as a recorder sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.batch import Batch

if TYPE_CHECKING:
    from paged.lab.theatre.recorder import Recorder


class Watched:
    """A runner whose every batch the recorder sees."""

    needs_lists = True  # the recorder reads the specification, whatever the runner reads

    def __init__(self, runner, recorder: Recorder):
        self._runner, self._recorder = runner, recorder

    def __getattr__(self, name: str):
        return getattr(self._runner, name)  # runs_ahead, watch

    def execute(self, batch: Batch) -> list:
        """As the runner's."""
        moves = self._recorder.launched(batch)
        results = self._recorder.guarded(moves, self._runner.execute, batch)
        self._recorder.finished(moves, results)
        return results

    def launch(self, batch: Batch) -> tuple:
        """As the runner's; what it did is reported when it is collected."""
        moves = self._recorder.launched(batch)
        return moves, self._recorder.guarded(moves, self._runner.launch, batch)

    def collect(self, handle: tuple) -> list:
        """As the runner's."""
        moves, inner = handle
        results = self._recorder.guarded(moves, self._runner.collect, inner)
        self._recorder.finished(moves, results)
        return results
