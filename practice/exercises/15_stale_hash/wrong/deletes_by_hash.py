"""Deletes the entry of the hash when any of its blocks is forgotten."""

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
        self.forget(block)
        key = chained_hash(parent, tokens)
        self.block_of[key] = block
        self.hash_of[block] = key
        return key

    def forget(self, block):
        self.block_of.pop(self.hash_of.pop(block, None), None)

    def find(self, parent, tokens):
        return self.block_of.get(chained_hash(parent, tokens))
