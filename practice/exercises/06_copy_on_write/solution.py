from collections import Counter, deque


class BlockPool:
    """A fixed number of blocks, with a reference count for each and a queue of the free ones."""

    def __init__(self, num_blocks: int):
        self.ref_cnt = [0] * num_blocks
        self._queue = deque(range(num_blocks))

    def num_free(self) -> int:
        return len(self._queue)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._queue):
            return None
        blocks = [self._queue.popleft() for _ in range(n)]
        for block in blocks:
            self.ref_cnt[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block, count in Counter(blocks).items():
            if not 0 <= block < len(self.ref_cnt) or count > self.ref_cnt[block]:
                raise ValueError(f"block {block} cannot be freed")
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self._queue.append(block)

    def fork(self, block_table: list[int]) -> list[int]:
        """A second table over the same blocks, each with one more reference."""
        for block in block_table:
            if self.ref_cnt[block] == 0:
                raise ValueError(f"block {block} is free: it cannot be shared")
        for block in block_table:
            self.ref_cnt[block] += 1
        return list(block_table)

    def copy_on_write(self, block_table: list[int], index: int) -> tuple[int, int] | None:
        """Make block_table[index] safe to write; (old, new) when the caller must copy, else
        None."""
        old = block_table[index]
        if self.ref_cnt[old] == 0:
            raise ValueError(f"block {old} is free: it cannot be written")
        if self.ref_cnt[old] == 1:
            return None
        new = self.allocate(1)
        if new is None:
            raise MemoryError(f"block {old} is shared, and copying it needs a free block")
        block_table[index] = new[0]
        self.free([old])
        return old, new[0]
