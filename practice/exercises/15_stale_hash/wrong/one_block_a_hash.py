"""Notices stale entries, but remembers one block a hash: the other of two is lost."""

import hashlib


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    data = b"" if parent is None else parent.to_bytes(8, "little")
    for token in tokens:
        data += token.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


class PrefixCache:
    def __init__(self):
        self.block_of, self.hash_of = {}, {}

    def register(self, block, parent, tokens):
        key = chained_hash(parent, tokens)
        self.block_of[key] = block
        self.hash_of[block] = key
        return key

    def forget(self, block):
        self.hash_of.pop(block, None)

    def find(self, parent, tokens):
        key = chained_hash(parent, tokens)
        block = self.block_of.get(key)
        return block if block is not None and self.hash_of.get(block) == key else None
