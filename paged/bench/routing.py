"""Which replica gets a request: the rules between a fleet and those who ask it.

A router sees the chained hashes of a prompt's blocks and how many requests each replica has, and
nothing of what happens inside. Prefixes are worth going back to only as long as nobody is overrun:

    bound    a replica takes no more than `bound` times its equal share of all requests under way

Follows consistent hashing with bounded loads (Mirrokni et al., SODA 2018) and the cache-aware
routing of SGLang's router, which sends a request where most of its prefix was sent before.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence

from paged.bench.conversations import CHAIN


class Router:
    """What all rules share: the count of requests under way, by replica.

    Args:
        num_replicas: replicas.
        num_blocks: blocks of each.
    """

    def __init__(self, num_replicas: int, num_blocks: int):
        self.num_replicas, self.num_blocks = num_replicas, num_blocks
        self.loads = [0] * num_replicas

    def send(self, hashes: Sequence[int]) -> int:
        """The replica that gets a request whose prompt has these blocks."""
        replica = self._choose(hashes)
        self.loads[replica] += 1
        return replica

    def done(self, replica: int, hashes: Sequence[int]) -> None:
        """One of its requests has ended, and left these blocks."""
        self.loads[replica] -= 1

    def _choose(self, hashes: Sequence[int]) -> int:
        raise NotImplementedError

    def _most(self, bound: float = 1.25) -> int:
        """Requests that a replica may have, the next one included."""
        return math.ceil(bound * (sum(self.loads) + 1) / self.num_replicas)


class RoundRobin(Router):
    """One after the other."""

    _next = -1

    def _choose(self, hashes: Sequence[int]) -> int:
        self._next = (self._next + 1) % self.num_replicas
        return self._next


class FirstBlocks(Router):
    """Consistent hashing of the first blocks: whoever begins alike goes to the same replica, or,
    where that has too many, to the next one on the ring."""

    FIRST, POINTS = 4, 64  # blocks that are looked at; points of each replica on the ring

    def __init__(self, num_replicas: int, num_blocks: int):
        super().__init__(num_replicas, num_blocks)
        self._ring = sorted((CHAIN(None, [replica, point]), replica)
                            for replica in range(num_replicas) for point in range(self.POINTS))

    def _choose(self, hashes: Sequence[int]) -> int:
        first = hashes[:self.FIRST][-1] if hashes else 0
        at, most = bisect(self._ring, (first, -1)), self._most()
        while self.loads[self._ring[at % len(self._ring)][1]] >= most:
            at += 1
        return self._ring[at % len(self._ring)][1]


class LongestMatch(Router):
    """Where most of the prompt's blocks were last, among those that have not too many requests; the
    least loaded of equals.

    What a replica has thrown away meanwhile the router does not see: it remembers as many blocks as
    the replica has, those that were used last.
    """

    def __init__(self, num_replicas: int, num_blocks: int):
        super().__init__(num_replicas, num_blocks)
        self._where: dict[int, set[int]] = {}
        self._held = [OrderedDict[int, None]() for _ in range(num_replicas)]

    def _choose(self, hashes: Sequence[int]) -> int:
        most = self._most()
        those = {replica for replica, load in enumerate(self.loads) if load < most}
        for hash in hashes:
            have_it = those & self._where.get(hash, set())
            if not have_it:
                break
            those = have_it
        best = min(those, key=lambda replica: (self.loads[replica], replica))
        self._remember(best, hashes)
        return best

    def done(self, replica: int, hashes: Sequence[int]) -> None:
        super().done(replica, hashes)
        self._remember(replica, hashes)

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        """The head of a prefix is forgotten last, as in the replica."""
        held = self._held[replica]
        for hash in reversed(hashes):
            held[hash] = None
            held.move_to_end(hash)
            self._where.setdefault(hash, set()).add(replica)
        while len(held) > self.num_blocks:
            hash, _ = held.popitem(last=False)
            where = self._where[hash]
            where.discard(replica)
            if not where:
                del self._where[hash]


ROUTERS: dict[str, type[Router]] = {
    "round robin": RoundRobin, "first blocks": FirstBlocks, "longest match": LongestMatch
}
