"""The radix tree gives the answers of the chained hashes: for any block size, through splits and
evictions.

Protects the interface that the scheduler uses: root, match, register, forget, clear.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from paged import BlockPool, PrefixCache
from paged.radix_cache import RadixCache
from tests import oracle
from tests.engines import make_engine, run


class Tenant:
    """Takes blocks for prompts as a scheduler would, on a cache of one kind."""

    def __init__(self, kind, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks)
        self.cache = kind(self.pool, block_size)
        self.size = block_size

    def take(self, tokens, salt=None) -> list[int] | None:
        """A table for the tokens, every full block of it registered; None when too few blocks are
        free."""
        hits, prefix = self.cache.match(tokens, salt)
        self.pool.share(hits)
        new = self.pool.allocate(-(-len(tokens) // self.size) - len(hits))
        if new is None:
            self.pool.free(reversed(hits))
            return None
        table = hits + new
        for index in range(len(hits), len(tokens) // self.size):
            block_tokens = tokens[index * self.size:(index + 1) * self.size]
            prefix = self.cache.register(prefix, block_tokens, table[index])
        return table


def check_tree(cache: RadixCache) -> None:
    """Raise AssertionError unless every run, link and block is where it must be."""
    found = {}

    def walk(node):
        assert len(node.tokens) == len(node.blocks) * cache.block_size
        for index, blocks in enumerate(node.blocks):
            for block in blocks:
                assert block not in found, f"block {block} stands twice"
                found[block] = node.start + index + 1
        for key, child in node.children.items():
            assert child.parent is node and child.start == node.start + len(node.blocks)
            assert key == tuple(child.tokens[:cache.block_size])
            walk(child)
        if node.parent is not None and not node.children:
            assert node.blocks[-1], "a run ends in something that nobody holds"

    for root in list(cache._roots.values()):
        walk(root)
    assert found == {block: place.depth for block, place in cache._place_of.items()}


@pytest.mark.parametrize("seed", range(60))
def test_same_answers_as_the_chained_hashes(seed):
    r = random.Random(seed)
    block_size, num_blocks = r.randint(1, 4), r.randint(2, 25)
    hashed, tree = (Tenant(kind, num_blocks, block_size) for kind in (PrefixCache, RadixCache))
    held, seen = [], []
    for _ in range(150):
        if held and r.random() < 0.45:
            index = r.randrange(len(held))
            for tenant, table in zip((hashed, tree), held.pop(index)):
                tenant.pool.free(reversed(table))
        else:
            start = r.choice(seen)[:r.randint(0, 20)] if seen and r.random() < 0.7 else []
            tokens = start + [r.randrange(2) for _ in range(r.randint(1, 9))]
            seen.append(tokens)
            salt = r.choice([None, None, "a"])
            tables = hashed.take(tokens, salt), tree.take(tokens, salt)
            assert tables[0] == tables[1]
            if tables[0] is not None:
                held.append(tables)
        assert hashed.pool.free_queue() == tree.pool.free_queue()
        assert len(hashed.cache) == len(tree.cache)
        check_tree(tree.cache)


@pytest.mark.parametrize("seed", range(150))
def test_same_steps_of_an_engine(seed):
    """Whole traces, step by step: the same hits, the same blocks, the same batches."""
    case = oracle.random_case(seed)
    steps = []
    for kind in ("hash", "radix"):
        engine = oracle.make_engine(replace(case, prefix_cache=kind, num_hashes=None))
        launch, tables = engine.launch, []

        def record(batch, launch=launch, tables=tables):
            tables.append((list(batch.seq_lens), [list(table) for table in batch.block_tables]))
            return launch(batch)

        engine.launch = record
        for index, arrival in enumerate(case.arrivals):
            oracle.submit(engine, case, arrival, str(index), Counter())
        run(engine, max_steps=2000)
        steps.append(tables)
    assert steps[0] == steps[1]


# ── splits, holes, handles ────────────────────────────────────────────────────────────────────────


def test_a_run_is_split_where_prefixes_part():
    tenant = Tenant(RadixCache, 8, 2)
    tenant.take([10, 20, 30, 40, 50, 60, 70, 80])
    tenant.take([10, 20, 30, 40, 51, 61])
    root = tenant.cache.root().node
    (top,) = root.children.values()
    assert top.tokens == [10, 20, 30, 40] and top.blocks == [[0], [1]]
    assert [child.tokens for child in top.children.values()] == [[50, 60, 70, 80], [51, 61]]
    assert tenant.cache.match([10, 20, 30, 40, 51, 61, 0])[0] == [0, 1, 4]


def test_a_prefix_survives_a_split_above_it_and_at_it():
    tenant = Tenant(RadixCache, 9, 1)
    _, short = tenant.cache.match([1, 2])
    tenant.take([1, 2, 3, 4])
    _, short = tenant.cache.match([1, 2, 9])
    _, long = tenant.cache.match([1, 2, 3, 4, 9])
    assert (short.depth, long.depth) == (2, 4)
    tenant.take([1, 7])
    tenant.take([1, 2, 8])
    assert tenant.cache.register(short, [3], tenant.pool.allocate(1)[0]).depth == 3
    assert tenant.cache.register(long, [5], tenant.pool.allocate(1)[0]).depth == 5
    assert len(tenant.cache.match([1, 2, 3, 4, 5, 0])[0]) == 5
    assert long.parent.depth == 3
    check_tree(tenant.cache)


def test_a_hole_ends_the_match_and_can_be_filled():
    tenant = Tenant(RadixCache, 4, 1)
    table = tenant.take([1, 2, 3])
    tenant.cache.forget(table[1])
    assert tenant.cache.match([1, 2, 3, 4])[0] == table[:1]
    check_tree(tenant.cache)
    _, place = tenant.cache.match([1, 2])
    (block,) = tenant.pool.allocate(1)
    tenant.cache.register(place, [2], block)
    assert tenant.cache.match([1, 2, 3, 4])[0] == [table[0], block, table[2]]


def test_an_empty_tree_holds_nothing():
    tenant = Tenant(RadixCache, 6, 2)
    for salt in ("a", "b"):
        tenant.pool.free(reversed(tenant.take([1, 2, 3, 4], salt)))
    assert len(tenant.cache) == 4
    tenant.pool.allocate(6)
    assert len(tenant.cache) == 0 and not list(tenant.cache._roots)
    tenant.cache.clear()
    assert tenant.cache.match([1, 2, 3])[0] == []


@pytest.mark.parametrize("kind", [PrefixCache, RadixCache])
def test_a_cleared_cache_finds_nothing_and_begins_anew(kind):
    tenant = Tenant(kind, 8, 2)
    tables = [tenant.take([1, 2, 3, 4], salt) for salt in (None, "a")]
    tenant.cache.clear()
    assert len(tenant.cache) == 0 and tenant.cache.contents() == {}
    assert [tenant.cache.match([1, 2, 3, 4], salt)[0] for salt in (None, "a")] == [[], []]
    for table in tables:
        tenant.pool.free(reversed(table))
    anew = tenant.take([1, 2, 3, 4] * 4)  # all blocks
    tenant.cache.check_integrity()
    assert tenant.cache.match([1, 2, 3, 4] * 4 + [5])[0] == anew


def test_what_is_refused():
    with pytest.raises(ValueError, match="block_size is 0"):
        RadixCache(BlockPool(1), 0)
    tenant = Tenant(RadixCache, 4, 2)
    root = tenant.cache.root()
    with pytest.raises(ValueError, match="1 tokens of 2"):
        tenant.cache.register(root, [1], 0)
    with pytest.raises(ValueError, match="block 3 is free"):
        tenant.cache.register(root, [1, 2], 3)
    (block,) = tenant.pool.allocate(1)
    tenant.cache.register(root, [1, 2], block)
    tenant.cache.register(root, [1, 2], block)  # again the same is no news
    with pytest.raises(ValueError, match="other tokens"):
        tenant.cache.register(root, [1, 3], block)


def test_one_token_blocks_share_to_the_token():
    engine = make_engine(num_blocks=60, block_size=1, prefix_cache="radix")
    for tokens, cached in (([1, 2, 3, 4, 5, 6], 0), ([1, 2, 3, 4, 5, 6], 5), ([1, 2, 3,
                                                                               9], 3), ([5], 0)):
        engine.add_request(tokens)
        (output,) = run(engine).values()
        assert output.num_cached_tokens == cached


def test_both_caches_say_alike_whether_a_prefix_goes_on():
    """In the middle of a run of blocks, where prefixes part, at a hole left by an eviction."""
    answers = Counter()
    for seed in range(30):
        r = random.Random(seed)
        size, num_blocks = r.randint(1, 3), r.randint(3, 14)
        hashed, tree = (Tenant(kind, num_blocks, size) for kind in (PrefixCache, RadixCache))
        seen = []
        for _ in range(40):
            start = r.choice(seen)[:r.randint(0, 12)] if seen and r.random() < 0.8 else []
            tokens = start + [r.randrange(2) for _ in range(r.randint(1, 8))]
            seen.append(tokens)
            tables = hashed.take(tokens), tree.take(tokens)
            assert tables[0] == tables[1]
            order = r.sample(tables[0] or [], len(tables[0] or []))  # heads may go first
            for tenant in (hashed, tree):
                tenant.pool.free(order)
            for asked in r.sample(seen, min(len(seen), 6)):
                asked = asked[:r.randint(1, len(asked))] + [r.randrange(2) for _ in range(size)]
                blocks, prefix = hashed.cache.match(asked)
                others, place = tree.cache.match(asked)
                assert blocks == others
                for _ in range(4):
                    more = [r.randrange(2) for _ in range(size)]
                    found = hashed.cache.continues(prefix, more)
                    assert tree.cache.continues(place, more) == found
                    hash = hashed.cache.hash_function(prefix.hash, more)
                    known = hashed.cache._find(prefix, tuple(more), hash)
                    answers[found, known is not None] += 1
    assert min(answers[True, True], answers[False, False], answers[False, True]) > 10, answers
