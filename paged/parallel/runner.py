"""One runner out of those of all ranks: each has its own, and rank 0 sends the batches around."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from paged.batch import Batch, RowOutput
from paged.checks import whole_number
from paged.device import use_device
from paged.models.loader import Loaded, find
from paged.parallel.ranks import Driver, Worker, check_room, join, under_torchrun
from paged.trace import NO_TRACE


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


def on_every_rank(init: Callable) -> Callable:
    """Of the __init__ of an LLM: with tensor_parallel_size above 1, do it on as many ranks.

    `self.ranks` is what they are, or None; `device` becomes a rank's own. The others get the same
    arguments, and say nothing. If it fails on one, it fails on all, and none of them stays.
    """

    @wraps(init)
    def begin(self, *args, **kwargs) -> None:
        self.ranks = None
        size = whole_number("tensor_parallel_size", kwargs.get("tensor_parallel_size", 1), least=1)
        if size == 1:
            init(self, *args, **kwargs)
            return
        bound = signature(init).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if isinstance(given["model"], Loaded):
            raise ValueError(f"a model that is given is whole, and tensor_parallel_size is {size}: "
                             f"give its name, and each rank reads its part")
        others = {name: value for name, value in given.items() if name != "self"}
        others |= {"trace": NO_TRACE, "use_tqdm": False, "revision": None, "tokenizer": None}
        device = use_device(given["device"])
        check_room(size, device)
        if not callable(given["model"]) and not under_torchrun():
            others["model"] = find(given["model"], given["revision"])  # here, and once
        self.ranks = join(size, device, type(self), others)
        given["device"] = self.ranks.device
        try:
            with self.ranks.together():
                init(*bound.args, **bound.kwargs)
        except BaseException:
            self.ranks.close()
            raise

    return begin
