class BlockPool:
    """A fixed number of blocks, with a reference count for each and a queue of the free ones."""

    def __init__(self, num_blocks: int):
        self.ref_cnt = [0] * num_blocks

    def num_free(self) -> int:
        """Blocks that nobody holds."""
        raise NotImplementedError

    def allocate(self, n: int) -> list[int] | None:
        """The next n blocks of the queue, or None (and no change) when fewer are free."""
        raise NotImplementedError

    def free(self, blocks: list[int]) -> None:
        """Give up one reference to each block, in order; at 0 a block joins the tail of the
        queue."""
        raise NotImplementedError
