"""Several engines on a Ray cluster, and what becomes of a line whose engine is lost.

Each replica is a Ray actor with an LLM of its own, which takes so many lines at once; Ray finds the
GPUs for it, and starts it again when its process or its machine has gone. Meanwhile its lines are
with the others:

    places    (0, a) (0, b) (0, c)  (1, a) (1, b) …       a line takes the first that is free, so
                                                          that replicas have equally many

Actors and no Ray Data: a result is written when it is there, not when the block of its neighbours
is, and only lines that were with the lost worker are computed again, not blocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import nullcontext
from itertools import product
from typing import Any

from paged.offline.requests import Line
from paged.offline.run import answer_line

MOST_LOSSES = 4
"""Workers that a line may lose until it is at fault itself."""
SUSPICIOUS = 2
"""Losses from which on a line is tried while no other such line is."""


def start_ray() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or of this machine; else to a new one here.
    Raises ImportError where it is not installed."""
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports home otherwise
        import ray
    except ImportError as error:
        raise ImportError(f"{error}: install what --ray needs with "
                          f"pip install 'paged[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    return ray


class Replica:
    """An engine, in a process that Ray has started."""

    def __init__(self, model: str, name: str, arguments: dict[str, Any]):
        from paged.async_llm import AsyncLLM
        self.llm, self.name = AsyncLLM(model, **arguments), name

    async def ready(self) -> None:
        """Returns when there is an engine."""

    async def answer(self, line: Line) -> dict[str, Any]:
        """See `answer_line`."""
        return await answer_line(self.llm, self.name, line)


class Replicas:
    """So many of them; made inside an event loop.

    Args:
        ray: as `start_ray` returns it.
        count: replicas; None for as many as the cluster's GPUs are enough for, or one without GPUs.
        lines_at_once: of each.
        model, name, arguments: for `LLM`, and the name that bodies may give.

    Attributes:
        num_places: lines that may be under way.
        num_lost: lines that lost their worker, each time they did.
    """

    def __init__(self, ray, count: int | None, lines_at_once: int, model: str, name: str,
                 arguments: dict[str, Any]):
        self._ray, self._alone, self.num_lost = ray, asyncio.Lock(), 0
        gpus_there = int(ray.cluster_resources().get("GPU", 0))
        gpus = arguments.get("tensor_parallel_size", 1)
        if arguments["device"] == "cpu" or not gpus_there:
            gpus = 0
        count = count or max(1, gpus_there // gpus if gpus else 1)
        actor = ray.remote(Replica).options(num_gpus=gpus, num_cpus=1, max_restarts=-1,
                                            max_concurrency=lines_at_once + 1)
        self._replicas = [actor.remote(model, name, arguments) for _ in range(count)]
        self._places: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening = set[asyncio.Task]()
        for place in product(range(lines_at_once), range(count)):
            self._open(place)
        self.num_places = count * lines_at_once

    async def answer(self, line: Line) -> dict[str, Any]:
        """The result of a line, from whichever replica has a place for it. Raises RuntimeError if
        it has lost MOST_LOSSES of them."""
        for num_lost in range(MOST_LOSSES):
            async with self._alone if num_lost >= SUSPICIOUS else nullcontext():
                place = await self._places.get()
                try:
                    result = await self._replicas[place[1]].answer.remote(line)
                except self._ray.exceptions.RayActorError:
                    self.num_lost += 1
                    self._open(place)
                    continue
                except self._ray.exceptions.RayTaskError as error:
                    self._places.put_nowait(place)
                    raise RuntimeError(str(error.cause) or repr(error.cause)) from None
                self._places.put_nowait(place)
                return result
        raise RuntimeError(f"{MOST_LOSSES} workers in a row were lost while they had this line")

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what needs replicas, and end them. Raises ValueError, and stops, if one of them cannot
        be made."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            await (task if task.done() else self._broken)
        finally:
            for one in (task, *self._opening):
                one.cancel()
            await asyncio.gather(task, *self._opening, return_exceptions=True)
            for replica in self._replicas:
                self._ray.kill(replica)

    def _open(self, place: tuple[int, int]) -> None:
        """Offer a place, as soon as its replica has an engine."""

        async def wait() -> None:
            try:
                await self._replicas[place[1]].ready.options(max_task_retries=-1).remote()
                self._places.put_nowait(place)
            except self._ray.exceptions.RayActorError as error:
                if not self._broken.done():
                    why = str(error).strip().splitlines()[-1]  # what comes before is a traceback
                    self._broken.set_exception(ValueError(f"a replica could not be made: {why}"))

        self._opening.add(asyncio.create_task(wait()))
