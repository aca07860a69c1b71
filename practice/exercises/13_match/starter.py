from dataclasses import dataclass, field


@dataclass
class Cache:
    """A pool of blocks with a prefix cache over it."""

    block_size: int
    ref_cnt: list[int]  # holders of each block
    free: list[int]  # free blocks, the next one to be handed out first
    block_of: dict[int, int] = field(default_factory=dict)  # chained hash -> block that holds it


def block_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The chained hashes of the full blocks."""
    hashes, parent = [], None
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash((parent, *token_ids[end - block_size:end]))
        hashes.append(parent)
    return hashes


# Yours from here on.
def take_blocks(token_ids: list[int], cache: Cache) -> list[tuple[str, int]] | None:
    """Blocks for a prompt, each with the way it was got; None (and no change) if too few are
    free."""
    raise NotImplementedError
