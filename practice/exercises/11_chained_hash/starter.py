import hashlib  # noqa: F401


def chained_hash(parent: int | None, tokens: list[int]) -> int:
    """The hash of a block, chained to that of the block before it."""
    raise NotImplementedError


def block_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The hashes of the full blocks of a prompt."""
    raise NotImplementedError
