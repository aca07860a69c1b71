from collections.abc import Iterable, Iterator


class FreeQueue:
    """Free blocks in the order in which they will be handed out; every operation takes constant
    time."""

    def __init__(self, blocks: Iterable[int]):
        self.blocks = list(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)

    def pop(self) -> int:
        """Take the head."""
        raise NotImplementedError

    def append(self, block: int) -> None:
        """Add at the tail."""
        raise NotImplementedError

    def remove(self, block: int) -> None:
        """Take a block out, wherever it stands."""
        raise NotImplementedError


def release(block_table: list[int], ref_cnt: list[int], queue: FreeQueue) -> list[int]:
    """Give up one reference to each block of a table; the blocks that became free, tails first."""
    raise NotImplementedError
