from dataclasses import dataclass


@dataclass
class Request:
    """What the prefix cache needs to know of a request."""

    token_ids: list[int]
    block_table: list[int]
    num_registered: int = 0  # full blocks that are registered already
    last_hash: int | None = None  # the hash of the last of them


def hash_block(parent: int | None, tokens: list[int]) -> int:
    """The chained hash of the previous exercises, in short."""
    return hash((parent, *tokens))


def register_computed(request: Request, num_computed: int, block_size: int,
                      block_of: dict[int, int]) -> int:
    """Enter the blocks that the first num_computed tokens fill; how many were new to this
    request."""
    first, end = request.num_registered, num_computed // block_size
    for index in range(first, end):
        tokens = request.token_ids[index * block_size:(index + 1) * block_size]
        request.last_hash = hash_block(request.last_hash, tokens)
        block_of.setdefault(request.last_hash, request.block_table[index])
    request.num_registered = end
    return end - first
