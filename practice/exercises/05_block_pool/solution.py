from collections import Counter, deque


class BlockPool:
    """A fixed number of blocks, with a reference count for each and a queue of the free ones."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: a pool needs at least one block")
        self.ref_cnt = [0] * num_blocks
        self._queue = deque(range(num_blocks))

    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._queue)

    def allocate(self, n: int) -> list[int] | None:
        """The next n blocks of the queue, or None (and no change) when fewer are free."""
        if n > len(self._queue):
            return None
        blocks = [self._queue.popleft() for _ in range(n)]
        for block in blocks:
            self.ref_cnt[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give up one reference to each block, in order; at 0 a block joins the tail of the
        queue."""
        for block, count in Counter(blocks).items():
            if not 0 <= block < len(self.ref_cnt):
                raise ValueError(f"block {block} is not in this pool of {len(self.ref_cnt)} blocks")
            if count > self.ref_cnt[block]:
                raise ValueError(f"block {block} has {self.ref_cnt[block]} references, not {count}")
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self._queue.append(block)
