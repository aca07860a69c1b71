"""free checks each block just before it changes it: an error in the middle leaves half of it done."""

from collections import deque


class BlockPool:
    def __init__(self, num_blocks):
        if num_blocks < 1:
            raise ValueError
        self.ref_cnt = [0] * num_blocks
        self.queue = deque(range(num_blocks))

    def num_free(self):
        return len(self.queue)

    def allocate(self, n):
        if n > len(self.queue):
            return None
        blocks = [self.queue.popleft() for _ in range(n)]
        for block in blocks:
            self.ref_cnt[block] = 1
        return blocks

    def free(self, blocks):
        for block in blocks:
            if not 0 <= block < len(self.ref_cnt) or self.ref_cnt[block] == 0:
                raise ValueError
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.queue.append(block)
