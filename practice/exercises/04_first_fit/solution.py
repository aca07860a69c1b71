class FirstFit:
    """A strip of rows in which every allocation is one piece."""

    def __init__(self, size: int):
        self.size = size
        self._pieces = {}  # start -> length

    def _holes(self):
        """(start, length) of what lies between the pieces, in ascending order; a length may be
        0."""
        end = 0
        for start in sorted(self._pieces):
            yield end, start - end
            end = start + self._pieces[start]
        yield end, self.size - end

    def allocate(self, length: int) -> int | None:
        """Address of the first hole that is long enough, which is taken; None if there is none."""
        if length < 1:
            raise ValueError(f"length is {length}: a piece has at least one row")
        for start, room in self._holes():
            if room >= length:
                self._pieces[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Give back the piece that was allocated at `start`."""
        if start not in self._pieces:
            raise ValueError(f"no piece starts at row {start}")
        del self._pieces[start]

    def num_free(self) -> int:
        """Rows that nobody holds."""
        return sum(length for _, length in self._holes())

    def largest_hole(self) -> int:
        """Rows of the longest piece that could be allocated now."""
        return max(length for _, length in self._holes())
