"""Takes a parent of 0 for no parent."""

import hashlib


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    data = b"" if not parent else parent.to_bytes(8, "little")
    for token in tokens:
        data += token.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def block_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The hashes of the full blocks of a prompt."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: a block holds at least one token")
    hashes, parent = [], None
    for index in range(len(token_ids) // block_size):
        parent = chained_hash(parent, token_ids[index * block_size:(index + 1) * block_size])
        hashes.append(parent)
    return hashes
