"""One runner out of those of all ranks: each has its own, and rank 0 sends the batches around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged.batch import Batch, RowOutput
from paged.parallel.ranks import Driver, Ranks, Worker


class RankedRunner:
    """The runner of rank 0 as an engine sees it: what is launched here is launched everywhere.

    Args:
        runner: this rank's own; whatever is not said here is asked of it.
        ranks: the others, who `serve` theirs.

    Every rank draws the same tokens, from the same logits and seeds; this one's are taken. If one
    dies or fails, a step raises RankLost.
    """

    def __init__(self, runner, ranks: Driver):
        self.runner, self.ranks = runner, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def execute(self, batch: Batch) -> list[int | RowOutput]:
        """One entry a request of the batch; see `Engine`."""
        return self.collect(self.launch(batch))

    def launch(self, batch: Batch):
        """Start a step on every rank."""
        with self.ranks.together():
            self.ranks.send(batch)
            return self.runner.launch(batch)

    def collect(self, handle) -> list[int | RowOutput]:
        """What a launched step gave."""
        return self.runner.collect(handle)


def serve(runner, ranks: Worker) -> None:
    """Launch what rank 0 launches, until it is done."""
    while (batch := ranks.receive()) is not None:
        runner.launch(batch)


@contextmanager
def closed_on_failure(ranks: Ranks | None) -> Iterator[None]:
    """For what every rank does at the same time; if it fails here, none of them stays."""
    if ranks is None:
        yield
        return
    try:
        with ranks.together():
            yield
    except BaseException:
        ranks.close()
        raise
