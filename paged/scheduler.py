"""Who computes how many tokens in the next step, and which blocks they are written to.

Continuous batching with one token budget. Each step:

    1. every running request whose prompt is computed decodes one token          (arrival order)
    2. running requests in the middle of their prompt get a chunk                (arrival order)
    3. waiting requests are admitted and get their first chunk                   (arrival order)

until the budget, the seats (max_num_seqs) or the free blocks are used up. A request is admitted
when all of its prompt fits the free blocks, and takes them as its chunks come. A running request
that needs a block when none is free preempts the youngest running one, which may be itself. The
oldest is never preempted, and every request fits the pool on its own, so the oldest always advances
and every request ends.

Follows Orca (Yu et al., OSDI 2022), Sarathi-Serve (Agrawal et al., OSDI 2024) and the scheduler of
vLLM V1.
"""

from __future__ import annotations

import time
from bisect import insort

from paged.batch import Batch, build_batch, trace_batch
from paged.block_pool import BlockPool
from paged.prefix_cache import PrefixCache, check_names
from paged.radix_cache import RadixCache
from paged.request import PENDING, Request, Status
from paged.slots import blocks_needed
from paged.trace import NO_TRACE, Trace


class Scheduler:
    """Waiting and running requests, and the rules by which they share the pool and the step.

    Args:
        pool, block_size: the blocks.
        prefix_cache: None to share nothing between requests.
        max_num_seqs: requests that hold blocks at once.
        max_num_batched_tokens: tokens computed in one step.
        host_pool: blocks in host memory that preempted requests are swapped to; None to recompute
            instead.
        lists: build the batch's specification too, for runners that read it.

    Attributes:
        waiting, running: both in arrival order.
        scheduled: the requests of the last batch, in its order, each with its new tokens.
        num_preemptions: of all steps.
        num_cached_tokens: tokens that the requests admitted in the last step found in the prefix
            cache.
    """

    def __init__(self, pool: BlockPool, block_size: int,
                 prefix_cache: PrefixCache | RadixCache | None = None, max_num_seqs: int = 256,
                 max_num_batched_tokens: int = 8192, host_pool: BlockPool | None = None,
                 trace: Trace = NO_TRACE, lists: bool = True):
        self.pool, self.block_size, self.prefix_cache = pool, block_size, prefix_cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.host_pool, self.trace, self.lists = host_pool, trace, lists
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = self.num_cached_tokens = 0
        self.scheduled: dict[Request, int] = {}
        self._free_seats = list(range(max_num_seqs))[::-1]
        # A request that found too few blocks, with its hits and the free blocks there were.
        self._blocked: tuple[Request | None, int, int] = (None, 0, 0)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Batch | None:
        """Choose the next step's work and give it its blocks; None when there is none."""
        self._budget = self.max_num_batched_tokens
        self.scheduled = {}
        self._copies: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self.num_cached_tokens = 0
        preemptions = self.num_preemptions
        self._schedule_running()
        if self.num_preemptions == preemptions:  # whoever is out stays out for this step
            if self.waiting:
                for request in self.scheduled:
                    self._register_ahead(request)
            self._admit_waiting()
        return self._build_batch() if self.scheduled or self._swap_out or self._swap_in else None

    def _schedule_running(self) -> None:
        chunks = []
        block_size, scheduled, running = self.block_size, self.scheduled, Status.RUNNING
        for request in tuple(self.running):
            if request.status is not running:  # preempted a moment ago by an older one
                continue
            computed = request.num_computed_tokens
            remaining = len(request.token_ids) - computed
            if remaining > 1:
                chunks.append(request)
            elif remaining == 0:  # its last token is on its way
                continue
            elif self._budget == 0:
                break
            elif ((computed < len(request.block_table) * block_size and not request.may_share_tail)
                  or self._make_room(request, 1)):
                scheduled[request] = 1
                self._budget -= 1
        for request in chunks:
            if request.status is Status.RUNNING and self._budget:
                num_tokens = self._chunk(request)
                if num_tokens:
                    scheduled[request] = num_tokens
                    self._budget -= num_tokens

    def _chunk(self, request: Request) -> int:
        """Blocks for the next chunk of a prompt, as long as budget and free blocks allow; 0 if
        preempted."""
        remaining = min(len(request.token_ids) - request.num_computed_tokens, self._budget)
        room = ((len(request.block_table) + self.pool.num_free()) * self.block_size
                - request.num_computed_tokens)
        if 0 < room < remaining and not request.may_share_tail:
            remaining = room  # a shorter chunk rather than a preemption
        return remaining if self._make_room(request, remaining) else 0

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request writable blocks for its next num_tokens tokens.

        Preempts the youngest running requests as far as needed. Returns False if that was the
        request itself.
        """
        # The only shared block that can be written
        first = request.num_computed_tokens // self.block_size
        end = blocks_needed(request.num_computed_tokens + num_tokens, self.block_size)
        while True:
            table = request.block_table
            copies = first < len(table) and self.pool.ref_cnt[table[first]] > 1
            if end - len(table) + copies <= self.pool.num_free():
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        copy = self.pool.copy_on_write(table, first) if copies else None
        if copy is not None:
            self._copies.append(copy)
            request.num_known_blocks = min(request.num_known_blocks, first)
        if end > len(table):
            table += self._allocate(end - len(table))
        return True

    def _allocate(self, num_blocks: int) -> list[int]:
        """Blocks of which it is known that they are free."""
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None, f"{num_blocks} blocks wanted, {self.pool.num_free()} free"
        return blocks

    def _admit_waiting(self) -> None:
        seats = self.max_num_seqs - sum(request.num_seats for request in self.running)
        while self.waiting and self._budget and self.waiting[0].num_seats <= seats:
            request = self.waiting[0]
            if self._still_blocked(request):
                break
            if not (self._swap_back(request)
                    if request.status is Status.SWAPPED else self._admit(request)):
                break
            self.waiting.pop(0)
            self._blocked = (None, 0, 0)
            insort(self.running, request, key=lambda r: r.order)
            seats -= request.num_seats
            self._transition(request, Status.RUNNING)

    def _admit(self, request: Request) -> bool:
        """Blocks for a waiting request: cached ones, then new ones for its first chunk. False if
        too few."""
        hits: list[int] = []
        if self.prefix_cache is not None:
            request.prefix = self.prefix_cache.root(request.salt)
            if not request.wants_prompt_logprobs:  # else all of its prompt is computed, as in vLLM
                hits, request.prefix = self.prefix_cache.match(request.token_ids, request.salt)
        cached = len(hits) * self.block_size
        # Its chunks take their blocks as they come, but all must be there now: a prompt let in for
        # its first chunk alone may be put out before its last, and be computed again and again.
        if blocks_needed(len(request.token_ids),
                         self.block_size) - len(hits) > self._free_beside(hits):
            self._blocked = request, len(hits), self.pool.num_free()
            if self.trace.limit:
                self.trace.emit("ADMISSION_REFUSED", request=request.request_id, hits=len(hits),
                                needed=blocks_needed(len(request.token_ids),
                                                     self.block_size), free=self.pool.num_free())
            return False
        num_tokens = min(len(request.token_ids) - cached, self._budget)
        self.pool.share(hits)
        new = blocks_needed(cached + num_tokens, self.block_size) - len(hits)
        request.block_table = hits + self._allocate(new)
        request.num_computed_tokens = cached
        request.num_registered_blocks = len(hits)
        self.num_cached_tokens += cached
        if request.output.metrics.first_scheduled_time is None:
            request.output.metrics.first_scheduled_time = time.perf_counter()
            request.output.num_cached_tokens = cached
        self.scheduled[request] = num_tokens
        self._budget -= num_tokens
        self._register_ahead(request)
        return True

    def _still_blocked(self, request: Request) -> bool:
        """Whether nothing has changed since this request found too few blocks.

        Saves a long prompt that waits from being matched in every step: it needs more free blocks
        than there were, or one more cached block.
        """
        blocked, num_hits, num_free = self._blocked
        if blocked is not request or self.pool.num_free() > num_free:
            return False
        start = num_hits * self.block_size
        return self.prefix_cache is None or not self.prefix_cache.continues(
            request.prefix, request.token_ids[start:start + self.block_size])

    def _free_beside(self, hits: list[int]) -> int:
        """Free blocks to hand out beside the hits: one that nobody holds is in the free queue
        itself."""
        return self.pool.num_free() - sum(self.pool.ref_cnt[block] == 0 for block in hits)

    def _register_ahead(self, request: Request) -> None:
        """Let requests admitted later in this step share the prompt blocks that this one fills in
        it.

        They stand behind it in the batch, and a layer writes all K and V of the batch before it
        attends.
        """
        end = request.num_computed_tokens + self.scheduled[request]
        self.register_computed(request, min(end, request.num_prompt_tokens))

    def _swap_back(self, request: Request) -> bool:
        """Blocks for a swapped request and its next tokens. False if too few are free for all it
        has."""
        if blocks_needed(len(request.token_ids), self.block_size) > self.pool.num_free():
            return False
        num_tokens = min(len(request.token_ids) - request.num_computed_tokens, self._budget)
        blocks = self._allocate(
            blocks_needed(request.num_computed_tokens + num_tokens, self.block_size))
        assert self.host_pool is not None, "nobody is swapped out without a host pool"
        self._swap_in += zip(request.host_block_table, blocks)
        if self.trace.limit:
            self.trace.emit("SWAP_IN", request=request.request_id,
                            pairs=[list(pair) for pair in zip(request.host_block_table, blocks)])
        self.host_pool.free(reversed(request.host_block_table))
        request.block_table, request.host_block_table = blocks, []
        if self.prefix_cache is not None:  # its full blocks are registered again
            request.prefix, request.num_registered_blocks = self.prefix_cache.root(request.salt), 0
        if num_tokens:  # a beam may have nothing to do but wait
            self.scheduled[request] = num_tokens
            self._budget -= num_tokens
        return True

    def _build_batch(self) -> Batch:
        batch = build_batch(self.scheduled, self.block_size, self.lists)
        batch.block_copies = self._copies
        batch.swap_out, batch.swap_in = self._swap_out, self._swap_in
        if self.trace.limit:
            trace_batch(batch, self.scheduled, self.block_size, self.trace,
                        free=self.pool.num_free(), waiting=len(self.waiting))
        return batch

    # ── after the step ────────────────────────────────────────────────────────────────────────────

    def advance(self) -> list[tuple[Request, int]]:
        """The step is on its way: from here on its tokens count as computed, and each next token is
        PENDING.

        So the next step can be scheduled before this one's tokens are known. A request whose last
        token is pending, or must be known on the CPU before it goes on, has nothing left to
        schedule. Returns the requests of the step, and how many tokens of each are computed now.
        """
        launched = []
        for request, num_tokens in self.scheduled.items():
            request.num_computed_tokens = computed = request.num_computed_tokens + num_tokens
            launched.append((request, computed))
            if (computed == len(request.token_ids) < request.max_num_tokens - 1
                    and not request.waits):
                request.token_ids.append(PENDING)
        return launched

    def register_computed(self, request: Request, num_computed_tokens: int) -> None:
        """The K and V of so many tokens are in the cache: register the blocks that they fill."""
        size = self.block_size
        full = num_computed_tokens // size
        if self.prefix_cache is None or full <= request.num_registered_blocks:
            return
        for index in range(request.num_registered_blocks, full):
            tokens = request.token_ids[index * size:(index + 1) * size]
            request.prefix = self.prefix_cache.register(request.prefix, tokens,
                                                        request.block_table[index])
        request.num_registered_blocks = full

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self.waiting, request, key=lambda r: r.order)
        self._transition(request, Status.WAITING)

    def fork(self, parent: Request, child: Request) -> None:
        """Let child run over the parent's blocks, up to its last token, which it computes again for
        itself.

        The child shares every block; the one it writes to is copied when its turn comes. A parent
        that was preempted has none to share, and the child waits as well.
        """
        if parent.status is not Status.RUNNING:
            return self.add(child)
        child.block_table = self.pool.fork(parent.block_table)
        child.num_computed_tokens = len(child.token_ids) - 1
        parent.may_share_tail = child.may_share_tail = True
        if self.prefix_cache is not None:
            child.prefix, child.num_registered_blocks = parent.prefix, parent.num_registered_blocks
            while child.num_registered_blocks > child.num_computed_tokens // self.block_size:
                child.prefix = child.prefix.parent
                child.num_registered_blocks -= 1
        insort(self.running, child, key=lambda r: r.order)
        self._transition(child, Status.RUNNING)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and release every block it holds; one that has
        not been added yet is only marked."""
        queue = self.running if request.status is Status.RUNNING else self.waiting
        if request in queue:
            queue.remove(request)
        self._release(request)
        self._transition(request, Status.FINISHED)

    # ── preemption ────────────────────────────────────────────────────────────────────────────────

    def _preempt(self, victim: Request) -> None:
        """Take the blocks of the youngest running request; it waits again, in its old place in the
        order."""
        # A prompt is let in when all of it fits, and nobody behind it before it is computed: so the
        # youngest is looked at last, whether it decodes or has a chunk to compute.
        assert victim not in self.scheduled, f"{victim} has a place in this step"
        self.running.remove(victim)
        self.num_preemptions += 1
        victim.output.metrics.num_preemptions += 1
        num_blocks = blocks_needed(victim.num_computed_tokens, self.block_size)
        host = self.host_pool.allocate(num_blocks) if self.host_pool is not None else None
        if host is not None:
            blocks = victim.block_table[:num_blocks]
            self._swap_out += zip(blocks, host)
            if self.trace.limit:
                self.trace.emit("SWAP_OUT", request=victim.request_id,
                                pairs=[list(pair) for pair in zip(blocks, host)])
            computed = victim.num_computed_tokens
            self._release(victim)
            victim.num_computed_tokens, victim.host_block_table = computed, host
        else:
            self._release(victim)
        self._transition(victim, Status.WAITING if host is None else Status.SWAPPED)
        insort(self.waiting, victim, key=lambda r: r.order)

    def _release(self, request: Request) -> None:
        """Give back all blocks, tails first, so that the head of a prefix is evicted last."""
        self.pool.free(reversed(request.block_table))
        if self.host_pool is not None:
            self.host_pool.free(reversed(request.host_block_table))
        request.drop_blocks()

    # ── what a reader can see ─────────────────────────────────────────────────────────────────────

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, tables and queues agree; run between steps."""
        self.pool.check_integrity(request.block_table for request in self.running)
        if self.host_pool is not None:
            self.host_pool.check_integrity(request.host_block_table for request in self.waiting)
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
            check_names(self.prefix_cache.contents(), self.running, self.block_size)
        for request in self.waiting:
            assert not request.block_table, f"{request} waits and holds blocks"
        queue = self.running + self.waiting
        assert queue == sorted(queue, key=lambda r: r.order), "arrival order is lost"
        residents = sum(request.num_seats for request in self.running)
        assert residents <= self.max_num_seqs, "too many residents"
        taken = [request.seat for request in self.running if request.seat is not None]
        assert sorted(self._free_seats + taken) == list(range(
            self.max_num_seqs)), "a seat is lost, or taken twice"
        for request in self.running:
            held = len(request.block_table) * self.block_size
            assert request.num_computed_tokens <= min(held, len(
                request.token_ids)), f"{request} cannot be"

    def _transition(self, request: Request, status: Status) -> None:
        if self.trace.limit and (request.status is not status or status is Status.WAITING):
            self.trace.emit("STATE_TRANSITION", request=request.request_id,
                            before=request.status.value, after=status.value)
        if status is Status.RUNNING:
            request.seat, request.newly_seated = self._free_seats.pop(), True
        elif request.seat is not None:
            self._free_seats.append(request.seat)
            request.seat = None
        request.status = status
