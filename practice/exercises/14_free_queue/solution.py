from collections.abc import Iterable, Iterator


class FreeQueue:
    """Free blocks in the order in which they will be handed out; every operation takes constant
    time."""

    def __init__(self, blocks: Iterable[int]):
        self._next: dict[int | None, int | None] = {None: None}
        self._before: dict[int | None, int | None] = {None: None}
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = self._next[None]  # None stands before the head and behind the tail
        while block is not None:
            yield block
            block = self._next[block]

    def pop(self) -> int:
        """Take the head."""
        head = self._next[None]
        if head is None:
            raise IndexError("no block is free")
        self.remove(head)
        return head

    def append(self, block: int) -> None:
        """Add at the tail."""
        if block in self._next:
            raise ValueError(f"block {block} is in the queue already")
        tail = self._before[None]
        self._next[tail] = self._before[None] = block
        self._before[block], self._next[block] = tail, None
        self._length += 1

    def remove(self, block: int) -> None:
        """Take a block out, wherever it stands."""
        if block not in self._next:
            raise ValueError(f"block {block} is not in the queue")
        before, after = self._before.pop(block), self._next.pop(block)
        self._next[before], self._before[after] = after, before
        self._length -= 1


def release(block_table: list[int], ref_cnt: list[int], queue: FreeQueue) -> list[int]:
    """Give up one reference to each block of a table; the blocks that became free, tails first."""
    released = []
    for block in reversed(block_table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            queue.append(block)
            released.append(block)
    return released
