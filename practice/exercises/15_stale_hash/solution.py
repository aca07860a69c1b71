import hashlib


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    data = b"" if parent is None else parent.to_bytes(8, "little")
    for token in tokens:
        data += token.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


class PrefixCache:
    """Which block holds which tokens under which prefix."""

    def __init__(self):
        self._blocks_of = {}  # hash -> the blocks that hold it
        self._hash_of = {}  # block -> the hash it is registered under

    def register(self, block: int, parent: int | None, tokens: list[int]) -> int:
        """The block now holds these tokens under this prefix; returns the chained hash."""
        self.forget(block)
        key = chained_hash(parent, tokens)
        self._blocks_of.setdefault(key, []).append(block)
        self._hash_of[block] = key
        return key

    def forget(self, block: int) -> None:
        """The block was handed out: what it held is gone."""
        key = self._hash_of.pop(block, None)
        if key is not None:
            self._blocks_of[key].remove(block)
            if not self._blocks_of[key]:
                del self._blocks_of[key]

    def find(self, parent: int | None, tokens: list[int]) -> int | None:
        """A block that holds these tokens under this prefix, or None."""
        blocks = self._blocks_of.get(chained_hash(parent, tokens))
        return blocks[0] if blocks else None
