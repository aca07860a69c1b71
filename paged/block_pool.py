"""Which blocks are in use, how often, and which one is handed out next.

The logical layer of paged attention. A block is an integer; the pool knows nothing of tokens,
tensors or requests. It keeps a reference count for each block and a queue of the free ones:

    head ─► 5 ─► 6 ─► 7 ─► 0 ─► 1 ─► tail
    allocate() takes from the head               free() appends at the tail

A block in the queue still holds its old contents, so a prefix cache may take it back from anywhere
in the queue (`share`). That is why the queue is doubly linked: removal from the middle costs O(1).
Its order is the eviction order, least recently freed first.

Follows Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 4, and the free queue of vLLM V1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index

from paged.checks import whole_number
from paged.trace import NO_TRACE, Trace


class BlockPool:
    """A fixed number of blocks with reference counts and a free queue.

    Args:
        num_blocks: size of the pool, in blocks. Raises ValueError below 1.
        trace: receives KV_BLOCK_ALLOCATE, KV_BLOCK_REUSE, KV_BLOCK_REACTIVATE, KV_BLOCK_RELEASE,
            KV_BLOCK_COPY and REFERENCE_DROP, each with the number of free blocks after the event.

    Attributes:
        ref_cnt: one count a block; 0 means free.
        on_allocate: called with each block that is about to be handed out for new contents. The
            prefix cache sets it to forget what the block held.
    """

    def __init__(self, num_blocks: int, trace: Trace = NO_TRACE):
        self.num_blocks = num_blocks = whole_number("num_blocks", num_blocks, least=1)
        self.trace = trace
        self.ref_cnt = [0] * num_blocks
        self.on_allocate: Callable[[int], None] | None = None
        # The free queue: _next and _prev link the blocks in a ring, and index num_blocks is its
        # sentinel.
        self._next = list(range(1, num_blocks + 1)) + [0]
        self._prev = [num_blocks] + list(range(num_blocks))
        self._num_free = num_blocks

    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def free_queue(self) -> list[int]:
        """The free blocks in the order in which they will be handed out."""
        queue, block = [], self._next[self.num_blocks]
        while block != self.num_blocks and len(queue) <= self.num_blocks:  # a broken ring ends, too
            queue.append(block)
            block = self._next[block]
        return queue

    def allocate(self, n: int) -> list[int] | None:
        """Hand out n blocks from the head of the queue, or None (and no change) when fewer are
        free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._num_free:
            return None
        blocks = []
        for _ in range(n):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self.ref_cnt[block] = 1
            if self.on_allocate is not None:
                self.on_allocate(block)
            blocks.append(block)
            self.trace.emit("KV_BLOCK_ALLOCATE", block=block, free=self._num_free)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block, in the given order; blocks that reach 0 join the
        queue's tail.

        A request frees its table in reverse, so that the tail of a prefix is evicted before its
        head. Raises ValueError, with nothing changed, if a block is not in the pool or has fewer
        references than are given up.
        """
        blocks = [index(block)
                  for block in blocks]  # an array's or a tensor's, too: the queue holds ints
        self._check_held(blocks)
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self._append(block)
                self.trace.emit("KV_BLOCK_RELEASE", block=block, free=self._num_free)
            elif self.trace.limit:
                self.trace.emit("REFERENCE_DROP", blocks=[block], ref_cnt=self.ref_cnt[block],
                                free=self._num_free)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each block: REUSE if it is held, REACTIVATE out of the queue
        if free.

        The contents stay. Raises ValueError, with nothing changed, for a block that is not in the
        pool.
        """
        blocks = [index(block) for block in blocks]
        for block in blocks:
            self._check_known(block)
        for block in blocks:
            if self.ref_cnt[block] == 0:
                self._unlink(block)
                event = "KV_BLOCK_REACTIVATE"
            else:
                event = "KV_BLOCK_REUSE"
            self.ref_cnt[block] += 1
            self.trace.emit(event, block=block, ref_cnt=self.ref_cnt[block], free=self._num_free)

    def fork(self, block_table: list[int]) -> list[int]:
        """A second table over the same blocks, each with one more reference.

        Raises ValueError, with nothing changed, if one of them is free.
        """
        block_table = [index(block) for block in block_table]
        self._check_held(block_table)
        self.share(block_table)
        return block_table

    def copy_on_write(self, block_table: list[int], index: int) -> tuple[int, int] | None:
        """Make block_table[index] safe to write.

        A block with one reference already is, and nothing happens. A shared one is replaced in the
        table by a new block, and (source, destination) is returned: the caller copies the contents
        before it writes. Returns None when no copy is needed. Raises MemoryError, with nothing
        changed, when one is needed and no block is free.
        """
        source = block_table[index]
        self._check_held([source])
        if self.ref_cnt[source] == 1:
            return None
        new = self.allocate(1)
        if new is None:
            raise MemoryError(
                f"block {source} is shared and copying it needs a free block; the pool of "
                f"{self.num_blocks} has none")
        block_table[index] = new[0]
        self.free([source])
        self.trace.emit("KV_BLOCK_COPY", source=source, block=new[0], free=self._num_free)
        return source, new[0]

    def check_integrity(self, block_tables: Iterable[list[int]] | None = None) -> None:
        """Raise AssertionError unless the free and the used blocks partition the pool.

        With the tables of everyone who holds blocks, the counts must also be exactly what these
        tables hold.
        """
        queue = self.free_queue()
        assert len(queue) == len(set(queue)) == self._num_free, f"the free queue {queue} is broken"
        for block in queue:
            assert self._prev[
                self._next[block]] == block, f"the links around free block {block} are broken"
        free = {block for block, count in enumerate(self.ref_cnt) if count == 0}
        assert free == set(queue), f"free by count {sorted(free)}, free by queue {sorted(queue)}"
        if block_tables is not None:
            held = [0] * self.num_blocks
            for block_table in block_tables:
                for block in block_table:
                    held[block] += 1
            assert held == self.ref_cnt, f"tables hold {held}, the pool counts {self.ref_cnt}"

    def _check_known(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in this pool of {self.num_blocks} blocks")

    def _check_held(self, blocks: list[int]) -> None:
        for block in blocks:
            self._check_known(block)
            if self.ref_cnt[block] == 0:
                raise ValueError(f"block {block} is already free")
        if len(set(blocks)) < len(blocks):
            for block in set(blocks):
                if blocks.count(block) > self.ref_cnt[block]:
                    raise ValueError(f"block {block} is given {blocks.count(block)} times and has "
                                     f"{self.ref_cnt[block]} references")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._num_free -= 1

    def _append(self, block: int) -> None:
        last = self._prev[self.num_blocks]
        self._next[last] = self._prev[self.num_blocks] = block
        self._prev[block], self._next[block] = last, self.num_blocks
        self._num_free += 1
