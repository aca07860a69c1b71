"""A list: right, and each removal looks at all blocks before the one it takes."""

class FreeQueue:
    def __init__(self, blocks):
        self.blocks = list(blocks)

    def __len__(self):
        return len(self.blocks)

    def __iter__(self):
        return iter(self.blocks)

    def pop(self):
        return self.blocks.pop(0)

    def append(self, block):
        if block in self.blocks:
            raise ValueError
        self.blocks.append(block)

    def remove(self, block):
        self.blocks.remove(block)


def release(block_table, ref_cnt, queue):
    released = []
    for block in reversed(block_table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            queue.append(block)
            released.append(block)
    return released
