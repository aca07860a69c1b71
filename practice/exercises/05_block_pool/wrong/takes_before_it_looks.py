"""allocate takes blocks one by one and gives up in the middle: the blocks taken are lost."""

from collections import Counter, deque


class BlockPool:
    def __init__(self, num_blocks):
        if num_blocks < 1:
            raise ValueError
        self.ref_cnt = [0] * num_blocks
        self.queue = deque(range(num_blocks))

    def num_free(self):
        return len(self.queue)

    def allocate(self, n):
        blocks = []
        for _ in range(n):
            if not self.queue:
                return None
            block = self.queue.popleft()
            self.ref_cnt[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks):
        for block, count in Counter(blocks).items():
            if not 0 <= block < len(self.ref_cnt) or count > self.ref_cnt[block]:
                raise ValueError
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.queue.append(block)
