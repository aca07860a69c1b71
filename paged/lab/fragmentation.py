"""Four ways to give requests their memory, run over the same arrivals.

    reserve the maximum   one stretch of max_len slots a request, whatever it turns out to need
    reserve exactly       one stretch of just the right length; only an oracle knows it at arrival
    grow, first fit       one stretch for what is there, rounded up to a power of two, then moved
    paged                 blocks from anywhere, one at a time

A simulation in token slots and decode steps; plain Python. After the baselines of Kwon et al. (SOSP
2023, section 6.1), which reserve the maximum, a power of two, or exactly what an oracle says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from paged.block_pool import BlockPool
from paged.slots import blocks_needed


@dataclass(eq=False)
class Request:
    """A prompt and how many tokens will follow; `tokens` is how many of both there are by now."""

    arrival: int
    prompt: int
    output: int
    tokens: int = 0

    @property
    def final(self) -> int:
        """Tokens at the end of its life."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Usage:
    """What the slots of the whole memory are at the end of one step; the first five add up to all
    of them."""

    used: int  # hold a token
    reserved: int  # a token of this request will come here
    internal: int  # held, and no token will ever come
    external: int  # free, enough in sum for the request that waits, and in holes too small for it
    free: int  # free otherwise
    running: int
    finished: int
    copied: int  # tokens moved to a larger stretch, from the start until now
    recomputed: int  # tokens of preempted requests, from the start until now


class Contiguous:
    """One stretch of slots a request, in the first hole that is long enough.

    Args:
        capacity: slots.
        stretch: how many slots a request should get, given the request.
    """

    def __init__(self, capacity: int, stretch: Callable[[Request], int]):
        self.capacity, self.stretch = capacity, stretch
        self.holes = [(0, capacity)]  # (start, slots), by start; no two touch
        self.held: dict[Request, tuple[int, int]] = {}
        self.copied = 0

    def admit(self, request: Request) -> bool:
        """Give a request its first stretch, or nothing (False)."""
        return self._place(request, self.stretch(request))

    def grow(self, request: Request) -> bool:
        """Make room for one more token, if need be by a move; False when no hole is left for it."""
        if request.tokens < self.held[request][1]:
            return True
        old = self.held[request]
        if not self._place(request, self.stretch(request)):
            return False
        self._free(*old)
        self.copied += request.tokens
        return True

    def release(self, request: Request) -> None:
        """Take back all that a request holds."""
        self._free(*self.held.pop(request))

    def slots(self, request: Request) -> int:
        """How many slots a request holds."""
        return self.held[request][1]

    def pieces(self, request: Request) -> list[tuple[int, int]]:
        """Where a request lies: (first slot, slots), in the order of its tokens."""
        return [self.held[request]]

    def too_scattered(self, request: Request) -> bool:
        """Whether the holes would do for this request in sum, and none of them does."""
        need = self.stretch(request)
        return max(
            (size for _, size in self.holes), default=0) < need <= sum(size
                                                                       for _, size in self.holes)

    def _place(self, request: Request, size: int) -> bool:
        for i, (start, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i:i + 1] = [(start + size, hole - size)] if hole > size else []
                self.held[request] = (start, size)
                return True
        return False

    def _free(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole, length in sorted([*self.holes, (start, size)]):
            if merged and sum(merged[-1]) == hole:
                hole, length = merged[-1][0], merged.pop()[1] + length
            merged.append((hole, length))
        self.holes = merged


class Paged:
    """Blocks of the package's own pool, taken one at a time as tokens come."""

    def __init__(self, capacity: int, block_size: int):
        self.capacity, self.block_size = capacity, block_size
        self.pool = BlockPool(capacity // block_size)
        self.tables: dict[Request, list[int]] = {}
        self.copied = 0

    def admit(self, request: Request) -> bool:
        """Give a request the blocks for the tokens it has and one more, or nothing (False)."""
        blocks = self.pool.allocate(blocks_needed(request.tokens + 1, self.block_size))
        if blocks is None:
            return False
        self.tables[request] = blocks
        return True

    def grow(self, request: Request) -> bool:
        """Make room for one more token; False when that takes a block and none is free."""
        if request.tokens < len(self.tables[request]) * self.block_size:
            return True
        blocks = self.pool.allocate(1)
        if blocks is None:
            return False
        self.tables[request] += blocks
        return True

    def release(self, request: Request) -> None:
        """Take back all that a request holds."""
        self.pool.free(reversed(self.tables.pop(request)))

    def slots(self, request: Request) -> int:
        """How many slots a request holds."""
        return len(self.tables[request]) * self.block_size

    def pieces(self, request: Request) -> list[tuple[int, int]]:
        """Where a request lies: (first slot, slots), in the order of its tokens."""
        return [(block * self.block_size, self.block_size) for block in self.tables[request]]

    def too_scattered(self, request: Request) -> bool:
        """Never: any free block serves as well as any other."""
        return False


def allocators(capacity: int, max_len: int, block_size: int) -> dict[str, Contiguous | Paged]:
    """The four, by name, each over a memory of `capacity` slots."""
    return {
        "reserve the maximum": Contiguous(capacity, lambda request: max_len),
        "reserve exactly": Contiguous(capacity, lambda request: request.final),
        "grow, first fit": Contiguous(capacity, lambda request: 1 << request.tokens.bit_length()),
        "paged": Paged(capacity, block_size),
    }


def arrivals(requests: Sequence[tuple[int, int]], gap: int) -> list[Request]:
    """Requests made of (prompt, output) pairs, one arriving every `gap` steps."""
    return [Request(i * gap, prompt, output) for i, (prompt, output) in enumerate(requests)]


def simulate(allocator: Contiguous | Paged, requests: Sequence[Request]) -> Iterator[Usage]:
    """Serve requests first come, first served, one token each a step; after each step, say where
    memory is.

    A request is admitted when the allocator can place its prompt; nobody overtakes. When a running
    request cannot grow, the youngest one is preempted: its memory is taken, and it waits at the
    head of the queue to be computed again. Raises ValueError for a request that does not fit even
    alone.
    """
    coming = deque(replace(request, tokens=request.prompt) for request in requests)
    waiting: deque[Request] = deque()
    running: list[Request] = []  # by arrival: what is preempted last comes back first
    finished = recomputed = step = 0
    while finished < len(requests):
        while coming and coming[0].arrival <= step:
            waiting.append(coming.popleft())
        while waiting and allocator.admit(waiting[0]):
            running.append(waiting.popleft())
        if waiting and not running:
            raise ValueError(
                f"a request of {waiting[0].final} tokens does not fit {allocator.capacity} "
                f"slots, even alone: give it more memory or fewer tokens")
        for request in list(running):
            while request in running and not allocator.grow(request):
                victim = running.pop()
                allocator.release(victim)
                waiting.appendleft(victim)
                recomputed += victim.tokens
            if request in running:
                request.tokens += 1
        yield _usage(allocator, running, waiting, finished, recomputed)
        for request in [request for request in running if request.tokens == request.final]:
            running.remove(request)
            allocator.release(request)
            finished += 1
        step += 1


def _usage(allocator, running, waiting, finished, recomputed) -> Usage:
    used = reserved = internal = 0
    for request in running:
        held = allocator.slots(request)
        used += request.tokens
        reserved += min(held, request.final) - request.tokens
        internal += max(held - request.final, 0)
    left = allocator.capacity - used - reserved - internal
    scattered = bool(waiting) and allocator.too_scattered(waiting[0])
    return Usage(used, reserved, internal, left if scattered else 0, 0 if scattered else left,
                 len(running), finished, allocator.copied, recomputed)
