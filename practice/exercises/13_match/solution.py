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


def take_blocks(token_ids: list[int], cache: Cache) -> list[tuple[str, int]] | None:
    """Blocks for a prompt, each with the way it was got; None (and no change) if too few are
    free."""
    hits = []
    for key in block_hashes(token_ids[:-1], cache.block_size):  # the last token is always computed
        if key not in cache.block_of:
            break
        hits.append(cache.block_of[key])
    new = -(-len(token_ids) // cache.block_size) - len(hits)
    if new + sum(cache.ref_cnt[block] == 0 for block in hits) > len(cache.free):
        return None

    taken = []
    for block in hits:  # before any block is handed out anew
        if cache.ref_cnt[block]:
            taken.append(("REUSE", block))
        else:
            cache.free.remove(block)
            taken.append(("REACTIVATE", block))
        cache.ref_cnt[block] += 1
    for _ in range(new):
        block = cache.free.pop(0)
        cache.ref_cnt[block] = 1
        for key in [key for key, known in cache.block_of.items() if known == block]:
            del cache.block_of[key]
        taken.append(("ALLOCATE", block))
    return taken
