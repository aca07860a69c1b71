"""The cache as it shipped: compares the block's own tokens."""

import hashlib


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    data = b"" if parent is None else parent.to_bytes(8, "little")
    for token in tokens:
        data += token.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


class PrefixCache:
    def __init__(self):
        self.block_of, self.tokens_of = {}, {}

    def register(self, block, parent, tokens):
        key = chained_hash(parent, tokens)
        self.block_of[key] = block
        self.tokens_of[block] = list(tokens)
        return key

    def forget(self, block):
        self.tokens_of.pop(block, None)

    def find(self, parent, tokens):
        block = self.block_of.get(chained_hash(parent, tokens))
        return block if block is not None and self.tokens_of.get(block) == list(tokens) else None
