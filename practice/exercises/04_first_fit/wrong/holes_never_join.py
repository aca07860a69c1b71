"""Keeps a list of holes and never joins two that touch."""

class FirstFit:
    def __init__(self, size):
        self.size, self.holes, self.pieces = size, [(0, size)], {}

    def allocate(self, length):
        if length < 1:
            raise ValueError
        for index, (start, room) in enumerate(self.holes):
            if room >= length:
                self.holes[index:index + 1] = [(start + length, room - length)] if room > length else []
                self.pieces[start] = length
                return start
        return None

    def free(self, start):
        if start not in self.pieces:
            raise ValueError
        self.holes = sorted(self.holes + [(start, self.pieces.pop(start))])

    def num_free(self):
        return sum(length for _, length in self.holes)

    def largest_hole(self):
        return max((length for _, length in self.holes), default=0)
