"""A prefix cache that lies is found, before anybody believes it.

Protects every answer of the caches: each deliberate fault, made in the middle of a run, must be
seen by the engine's own check, or where only the contents of free blocks are wrong, by the oracle.
"""

from typing import Any
from unittest.mock import patch

import pytest

from paged import SamplingParams
from paged.prefix_cache import Prefix, PrefixCache
from paged.radix_cache import Node, Place, RadixCache
from tests.engines import make_engine
from tests.oracle import failure_of, random_case

FIRST, SECOND = [1, 2, 3, 0, 1, 2, 3, 0, 2, 1], [1, 2, 3, 0, 2, 2, 2, 2, 3, 1]


def engine_in_the_middle(prefix_cache):
    """Two requests run, over four blocks with names; a third has left two more behind."""
    engine = make_engine(num_blocks=24, prefix_cache=prefix_cache)
    engine.add_request([3, 3, 3, 3, 0, 0, 0, 0, 1], SamplingParams(max_tokens=1), salt="a")
    while engine.has_unfinished():
        engine.step()
    for prompt in (FIRST, SECOND):
        engine.add_request(prompt, SamplingParams(max_tokens=8))
    for _ in range(2):
        engine.step()
    engine.check_integrity()
    contents = engine.prefix_cache.contents()
    assert sorted(map(len, (tokens for _, tokens in contents.values()))) == [4, 4, 8, 8, 8]
    return engine, {content: block for block, content in contents.items()}


def key(tokens, length=8, salt=None):
    return salt, tuple(tokens[:length])


ONE, TWO, FREE = key(FIRST), key(SECOND), ("a", (3, 3, 3, 3, 0, 0, 0, 0))


def hash_faults(cache, blocks):
    """{what: a function that does it}, for a cache of chained hashes."""
    one, two, free = (cache._record_of[blocks[content]] for content in (ONE, TWO, FREE))

    def rename(block, record):
        cache._record_of[block].blocks.remove(block)
        record.blocks.append(block)
        cache._record_of[block] = record

    def other_tokens():
        one.tokens = (0, 0, 0, 0)

    def other_parent():
        one.parent = two

    def orphan():
        del cache._records[one.parent.hash]

    def lost_child():
        one.parent.num_children -= 1

    def empty_record():
        record = Prefix(two, (1, 1, 1, 1), cache.hash_function(two.hash, (1, 1, 1, 1)))
        cache._records[record.hash] = [record]
        two.num_children += 1

    def wrong_hash():
        cache._records[7] = cache._records.pop(one.hash)

    def twice():
        cache._records.setdefault(one.hash,
                                  []).append(double := Prefix(one.parent, one.tokens, one.hash))
        one.parent.num_children += 1
        double.blocks.append(one.blocks.pop())
        cache._record_of[double.blocks[0]] = double
        one.blocks.append(23)
        cache._record_of[23] = one

    def unknown_root():
        del cache._roots["a"]

    return {
        "a foreign block": lambda: rename(blocks[TWO], one),
        "a name on two blocks' way": lambda: one.blocks.append(blocks[TWO]),
        "a block in no record": lambda: one.blocks.clear(),
        "a record of no block": lambda: cache._record_of.pop(blocks[ONE]),
        "an empty bucket": lambda: cache._records.setdefault(9, []),
        "other tokens": other_tokens,
        "another parent": other_parent,
        "no parent": orphan,
        "a count of children": lost_child,
        "a record that leads nowhere": empty_record,
        "a wrong hash": wrong_hash,
        "the same twice": twice,
        "no root": unknown_root,
        "half a block": lambda: setattr(free, "tokens", (0, 0)),
    }


def radix_faults(cache, blocks):
    """The same for a tree."""
    one, two, free = (cache._place_of[blocks[content]] for content in (ONE, TWO, FREE))

    def exchange():
        one.node.blocks, two.node.blocks = two.node.blocks, one.node.blocks

    def moved():
        one.node.start += 1

    def other_tokens():
        one.node.tokens[-1] = 1

    def other_key():
        children = one.node.parent.children
        children[(9, 9, 9, 9)] = children.pop(tuple(one.node.tokens[:4]))

    def other_parent():
        one.node.parent = two.node

    def leads_nowhere():
        two.node.children[(1, 1, 1, 1)] = Node(two.node, 2, [1, 1, 1, 1], [[]])

    def deeper():
        cache._place_of[blocks[ONE]] = Place(one.node, 1)

    return {
        "places exchanged": exchange,
        "a block without a place": lambda: cache._place_of.pop(blocks[ONE]),
        "a place without its block": lambda: one.node.blocks[-1].clear(),
        "a block at two places": lambda: one.node.blocks[-1].append(blocks[TWO]),
        "moved": moved,
        "other tokens": other_tokens,
        "another key": other_key,
        "another parent": other_parent,
        "a run that leads nowhere": leads_nowhere,
        "a shallower place": deeper,
        "no root": lambda: cache._roots.pop("a"),
        "half a block": lambda: free.node.tokens.pop(),
    }


FAULTS = [
    ("hash", name)
    for name in hash_faults(*(lambda e, b: (e.prefix_cache, b))(*engine_in_the_middle("hash")))
] + [("radix", name)
     for name in radix_faults(*(lambda e, b: (e.prefix_cache, b))(*engine_in_the_middle("radix")))]


@pytest.mark.parametrize("kind, name", FAULTS)
def test_the_engine_finds_a_cache_that_contradicts_itself_or_its_requests(kind, name):
    engine, blocks = engine_in_the_middle(kind)
    (hash_faults if kind == "hash" else radix_faults)(engine.prefix_cache, blocks)[name]()
    with pytest.raises(AssertionError):
        engine.check_integrity()


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_block_named_before_it_is_full(kind):
    engine, _ = engine_in_the_middle(kind)
    request = engine.scheduler.running[0]
    engine.prefix_cache.register(request.prefix, [2, 1, 0, 0], request.block_table[2])
    with pytest.raises(AssertionError, match="is not full yet"):
        engine.check_integrity()


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_what_a_free_block_holds_is_for_the_oracle_to_say(kind):
    """Nobody who runs knows what two free blocks hold that have changed names."""
    engine, blocks = engine_in_the_middle(kind)
    cache, (one, two) = engine.prefix_cache, (blocks[FREE], blocks[key(FREE[1], 4, "a")])
    names = cache._record_of if kind == "hash" else cache._place_of
    names[one], names[two] = names[two], names[one]
    for block, other in ((one, two), (two, one)):
        holder = names[block]
        copies = (holder.blocks if kind == "hash" else holder.node.blocks[holder.depth - 1])
        copies[copies.index(other) if other in copies else 0] = block
    engine.check_integrity()
    with pytest.raises(AssertionError, match=f"block {one} is found as|block {two} is found as"):
        engine.runner.check_names()


ORIGINAL: dict[str, Any] = {"hash": PrefixCache.register, "radix": RadixCache.register}
LIES = {
    "the name stays when the block goes": [(PrefixCache, "forget", lambda self, block: None),
                                           (RadixCache, "forget", lambda self, block: None)],
    "the prefix before it is left out": [
        (PrefixCache, "register", lambda self, prefix, tokens, block: ORIGINAL["hash"]
         (self, self.root(), tokens, block)),
        (RadixCache, "register", lambda self, prefix, tokens, block: ORIGINAL["radix"]
         (self, self.root(), tokens, block))
    ],
    "tokens in another order": [
        (PrefixCache, "register", lambda self, prefix, tokens, block: ORIGINAL["hash"]
         (self, prefix, tokens[::-1], block)),
        (RadixCache, "register", lambda self, prefix, tokens, block: ORIGINAL["radix"]
         (self, prefix, tokens[::-1], block))
    ],
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("number, kind", [(0, "hash"), (1, "radix")])
def test_random_traces_find_a_lie_in_either_cache(name, number, kind):
    with patch.object(*LIES[name][number]):
        cases = (random_case(seed) for seed in range(600))
        assert any(case.prefix_cache == kind and failure_of(case) for case in cases)
