import hashlib


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    data = b"" if parent is None else parent.to_bytes(8, "little")
    for token in tokens:
        data += token.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


class PrefixCache:
    """Which block holds which tokens under which prefix. Something is wrong with it."""

    def __init__(self):
        self.block_of = {}  # hash -> block
        self.tokens_of = {}  # block -> its tokens

    def register(self, block: int, parent: int | None, tokens: list[int]) -> int:
        """The block now holds these tokens under this prefix; returns the chained hash."""
        key = chained_hash(parent, tokens)
        self.block_of[key] = block
        self.tokens_of[block] = list(tokens)
        return key

    def forget(self, block: int) -> None:
        """The block was handed out: what it held is gone."""
        self.tokens_of.pop(block, None)

    def find(self, parent: int | None, tokens: list[int]) -> int | None:
        """A block that holds these tokens under this prefix, or None."""
        block = self.block_of.get(chained_hash(parent, tokens))
        if block is not None and self.tokens_of.get(block) == list(tokens):
            return block
        return None
