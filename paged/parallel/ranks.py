"""The processes that share a model: how they find each other, talk, and end together.

    rank 0 ── batches, or anything that pickles ──► rank 1, rank 2 …     a socket each
       ╰───────────── sums, logits ─────────────────╯                    PyTorch's process group

Rank 0 is the process that has the engine. It starts the others on its own machine; under torchrun,
on one machine or several, all are there already and run the same program.

The sockets also say who is alive: the system closes those of a process that dies, however it dies.
Rank 0 then closes all of them, and a rank whose socket is closed ends at once, whatever it waits
for. So none is left behind, and rank 0 has a sentence instead of a wait without end.
"""

from __future__ import annotations

import hmac
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from paged.checks import whole_number
from paged.device import use_device
from paged.parallel.worker import start

CONTROL = "paged/control"  # the key under which rank 0 tells where it listens
MEET = timedelta(minutes=2)
GRACE = 0.5  # seconds in which, of several ranks that end, the one that began it is looked for


class RankLost(ConnectionError):
    """A rank has died or failed, and with it the model of which it held a part."""


class Failure(str):
    """What a rank says before it ends."""


class _Ranks:
    """The ranks of one model, as one of them sees them.

    Attributes:
        rank, size: which one this is, of how many.
        device: its own.
        lost: why they are of no use any more, or None.
    """

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, use_device(device)
        self.lost: str | None = None
        self.closed = False
        self._threads = torch.get_num_threads()
        if device.type == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:  # they share the cores
            torch.set_num_threads(max(1, self._threads // size))

    def _form_group(self, store: dist.Store) -> None:
        global _here
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("paged", store), rank=self.rank,
                                world_size=self.size,
                                device_id=self.device if backend == "nccl" else None)
        assert isinstance(self, Driver | Worker)
        _here = self

    def _dissolve(self) -> None:
        global _here
        if _here is self:
            _here = None
            if self.lost is None or self.device.type == "cpu":  # else it was given up
                with suppress(RuntimeError):  # of a group that has lost someone
                    dist.destroy_process_group()
        torch.set_num_threads(self._threads)


class Driver(_Ranks):
    """Rank 0: it says what is done.

    Args:
        size: how many ranks.
        device: "cpu" or "cuda"; rank i of a machine gets its GPU i.
        job, arguments: what the others are to run, job(**arguments), a function or class that can
            be imported; it must `join` them. Under torchrun they run their own program instead.
    """

    def __init__(self, size: int, device: torch.device, job: Callable, arguments: dict[str, Any]):
        super().__init__(0, size, own_device(device))
        self._processes: dict[int, subprocess.Popen] = {}
        self._connections: dict[int, Connection] = {}
        self._closing, self._over, self._ending = False, threading.Event(), threading.Lock()
        self._replies: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        try:
            if under_torchrun():
                store, host = _store(), os.environ["MASTER_ADDR"]
                if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
                    host = "127.0.0.1"
            else:
                host = "127.0.0.1"
                store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
                for rank in range(1, size):
                    self._processes[rank] = start(rank, size, store.port, job, arguments)
            self._meet(store, host)
            threading.Thread(target=self._watch, name="paged ranks", daemon=True).start()
            with self.together():
                self._form_group(store)
        except BaseException:
            self.close()
            raise

    def _meet(self, store: dist.Store, host: str) -> None:
        """Wait until every rank has connected itself, and shown that it was told how."""
        token = secrets.token_bytes(32)
        with socket.create_server(("127.0.0.1" if host == "127.0.0.1" else "", 0)) as server:
            store.set(CONTROL, json.dumps([host, server.getsockname()[1], token.hex()]))
            server.settimeout(0.2)
            while len(self._connections) < self.size - 1:
                for rank, process in self._processes.items():
                    if process.poll() is not None:
                        raise RankLost(f"{self._how_it_ended(rank)} before it was ready: what it "
                                       f"said stands above")
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.settimeout(10)
                    said = b""
                    while len(said) < 64 and (more := connection.recv(64 - len(said))):
                        said += more
                    if not hmac.compare_digest(said[:32], token):
                        connection.close()
                        continue
                    connection.settimeout(None)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._connections[int(said[32:])] = Connection(connection.detach())

    def send(self, message: Any) -> None:
        """Send something to every other rank; it is pickled once."""
        data = pickle.dumps(message)
        try:
            for connection in self._connections.values():
                connection.send_bytes(data)
        except OSError as error:
            self._over.wait(4 * GRACE)
            self.check()
            raise RankLost(f"the ranks cannot be reached: {error}") from error

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks ask about, each calling this with its own."""
        for _ in range(self.size - 1):
            _, value = self._replies.get()
            self.check()
            number = min(number, value)
        self.send(number)
        return number

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what every rank does at the same time: where it fails here, the others wait in vain
        and are ended, and where one of them fails, RankLost says why."""
        self.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                self._over.wait(4 * GRACE)  # most likely this is what the end of another looks like
                if self.lost is not None:
                    raise RankLost(self.lost) from error
            self._lose(f"rank 0 failed ({type(error).__name__}: {error})")
            raise

    def check(self) -> None:
        """Raises RankLost, with the reason, if one is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def close(self) -> None:
        """End the other ranks, and leave nothing of them."""
        if self.closed:
            return
        self.closed = self._closing = True
        if self.lost is None and len(self._connections) == self.size - 1:
            with suppress(RankLost):
                self.send(None)
        else:
            self._hang_up()
            if not self._connections:
                for process in self._processes.values():
                    process.kill()
        until = time.monotonic() + 10
        for process in self._processes.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._hang_up()
        self._dissolve()

    def _hang_up(self) -> None:
        with self._ending:  # the thread that watches does it too; closed twice, it is another's
            for connection in self._connections.values():
                connection.close()

    # ── on a thread of its own ────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Hear what the others say, and that they end."""
        open_: dict[Any, int] = {connection: rank for rank, connection in self._connections.items()}
        signs: dict[int, str] = {}  # what those said that ended, "" if nothing
        until = float("inf")
        while open_ and time.monotonic() < until:
            with suppress(OSError):  # closed while it was waited for
                ready: list[Any] = wait(list(open_), GRACE / 5 if signs else None)
                for connection in ready:
                    rank = open_[connection]
                    try:
                        message = connection.recv()
                    except (EOFError, OSError):
                        del open_[connection]
                        message = Failure()
                    if not isinstance(message, Failure):
                        self._replies.put((rank, message))
                    elif rank not in signs:
                        signs[rank] = message
                        until = min(until, time.monotonic() + GRACE)
            if self._closing:
                return
        silent = [rank for rank, said in signs.items() if not said]
        rank = (silent or list(signs))[0]
        said = signs[rank]
        self._lose(
            f"rank {rank} of {self.size} failed: {said}" if said else self._how_it_ended(rank))

    def _lose(self, reason: str) -> None:
        on_gpu = self.device.type == "cuda"
        if self.lost is None:  # a GPU may wait for ever for one that is gone
            way_out = "start the program again" if on_gpu else "make another LLM"
            self.lost = f"{reason}. Each rank holds a part of the model: {way_out}"
        self._over.set()
        self._hang_up()
        self._replies.put((0, None))
        group = dist.group.WORLD
        if on_gpu and group is not None:
            with suppress(RuntimeError, AttributeError):  # of an older PyTorch
                group.abort()  # what the GPU waits for in NCCL ends

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(1)
        how = "has ended"
        if code is not None:
            how = (f"was ended by {signal.Signals(-code).name}"
                   if code < 0 else f"ended with exit status {code}")
        return f"rank {rank} of {self.size} {how}"


class Worker(_Ranks):
    """Any other rank: it does what rank 0 says, and ends with it."""

    def __init__(self, rank: int, size: int, device: torch.device):
        super().__init__(rank, size, own_device(device))
        store = _store()
        host, port, token = json.loads(store.get(CONTROL))
        connection = socket.create_connection((host, port), 60)
        connection.settimeout(None)
        connection.sendall(bytes.fromhex(token) + str(rank).encode().rjust(32))
        self._connection = Connection(connection.detach())
        self._messages: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._listen, name="paged rank", daemon=True).start()
        self._form_group(store)

    def receive(self) -> Any:
        """What rank 0 sends next; None when it is done."""
        return self._messages.get()

    def smallest(self, number: int) -> int:
        """See `Driver.smallest`."""
        self._connection.send(number)
        return self.receive()

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Driver.together`: tells rank 0 what fails here."""
        try:
            yield
        except Exception as error:
            with suppress(OSError):
                self._connection.send(Failure(str(error) or type(error).__name__))
            raise

    def check(self) -> None:
        """Nothing: a rank that has lost rank 0 has ended."""

    def close(self) -> None:
        """Leave the ranks."""
        if not self.closed:
            self.closed = True
            self._dissolve()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._messages.put(self._connection.recv())
        if not self.closed:
            os._exit(1)  # the main thread may wait for a sum that never comes


Ranks = Driver | Worker
_here: Ranks | None = None
_joined = False


def join(size: int, device: torch.device, job: Callable, arguments: dict[str, Any]) -> Ranks:
    """Become a rank of `size`: rank 0, with the others started, or what torchrun has made of this
    process; the arguments are those of Driver. Raises what `check_room` does."""
    global _joined
    check_room(size, device)
    _joined = under_torchrun()
    rank = int(os.environ["RANK"]) if _joined else 0
    return Worker(rank, size, device) if rank else Driver(size, device, job, arguments)


def check_room(size: int, device: torch.device) -> None:
    """Raises ValueError where there are too few GPUs, or where the ranks are taken."""
    whole_number("tensor_parallel_size", size, least=2)
    if dist.is_initialized():
        raise ValueError("this process belongs to a process group already, and the ranks of a "
                         "model make their own: close the LLM that has it, or leave "
                         "init_process_group away")
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if world != size:
            raise ValueError(f"torchrun has started {world} processes and tensor_parallel_size is "
                             f"{size}: make them equal")
        if _joined:
            raise ValueError("the other ranks of torchrun have served an LLM and ended with it: "
                             "start the program again for another")
    if device.index is not None:
        raise ValueError(f"device is {str(device)!r} and tensor_parallel_size is {size}: the ranks "
                         f"of a machine take its GPUs from the first one on, so say 'cuda'")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if under_torchrun() else size
    if device.type == "cuda" and torch.cuda.device_count() < here:
        raise ValueError(f"{here} ranks need a GPU each and PyTorch sees "
                         f"{torch.cuda.device_count()}: lower tensor_parallel_size, or say "
                         f"device='cpu'")


def check_ranks() -> None:
    """Raises RankLost if this process has ranks and has lost one."""
    if _here is not None:
        _here.check()


def under_torchrun() -> bool:
    """Whether this process is one of several that torchrun, or `worker`, has started."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and os.environ["WORLD_SIZE"] != "1"


def own_device(device: torch.device) -> torch.device:
    """A rank's GPU, of those of its machine, or the CPU."""
    if device.type == "cpu":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0)


def _store() -> dist.Store:
    return next(dist.rendezvous("env://", timeout=MEET))[0]
