class FirstFit:
    """A strip of rows in which every allocation is one piece."""

    def __init__(self, size: int):
        self.size = size

    def allocate(self, length: int) -> int | None:
        """Address of the first hole that is long enough, which is taken; None if there is none."""
        raise NotImplementedError

    def free(self, start: int) -> None:
        """Give back the piece that was allocated at `start`."""
        raise NotImplementedError

    def num_free(self) -> int:
        """Rows that nobody holds."""
        raise NotImplementedError

    def largest_hole(self) -> int:
        """Rows of the longest piece that could be allocated now."""
        raise NotImplementedError
