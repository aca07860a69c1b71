"""Protects the prefix cache: what may be shared, in which of three ways, what is evicted first, and
what never.

Above all: whatever collides, is stale or is salted, a hit is a hit on the very same prefix.
"""

import itertools
import random

import pytest

from paged import BlockPool, Engine, EngineConfig, PrefixCache, SamplingParams, Trace
from paged.lab.oracle import OracleRunner, truth
from paged.prefix_cache import sha256_chain, xxh64_chain

MASK = (1 << 64) - 1

# ── the chained hash ──────────────────────────────────────────────────────────────────────────────


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, written from its specification."""
    p1, p2, p3, p4, p5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                          0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)

    def rotate(x, bits):
        return (x << bits | x >> 64 - bits) & MASK

    def mix(lane, word):
        return rotate(lane + word * p2 & MASK, 31) * p1 & MASK

    words = [int.from_bytes(data[i:i + 8], "little") for i in range(0, len(data), 8)]
    assert len(data) % 8 == 0
    h = p5
    if len(words) >= 4:
        lanes = [p1 + p2 & MASK, p2, 0, -p1 & MASK]
        while len(words) >= 4:
            lanes = [mix(lane, words.pop(0)) for lane in lanes]
        h = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            h = (h ^ mix(0, lane)) * p1 + p4 & MASK
    h = h + len(data) & MASK
    for word in words:
        h = rotate(h ^ mix(0, word), 27) * p1 + p4 & MASK
    h = (h ^ h >> 33) * p2 & MASK
    h = (h ^ h >> 29) * p3 & MASK
    return h ^ h >> 32


def as_bytes(tokens) -> bytes:
    return b"".join(token.to_bytes(8, "little") for token in tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16])
def test_xxh64_chain_is_what_the_specification_says(size):
    rng = random.Random(size)
    h = None
    for _ in range(4):
        tokens = [rng.randrange(150_000) for _ in range(size)]
        want = xxh64((b"" if h is None else h.to_bytes(8, "little")) + as_bytes(tokens))
        h = xxh64_chain(h, tokens)
        assert h == want


@pytest.mark.parametrize("chain", [xxh64_chain, sha256_chain])
def test_equal_blocks_under_different_prefixes_have_different_hashes(chain):
    first, second = [10, 20, 30, 40, 50, 60], [77, 88, 99, 40, 50, 60]
    assert chain(None, first[3:]) == chain(None, second[3:])
    assert chain(chain(None, first[:3]), first[3:]) != chain(chain(None, second[:3]), second[3:])


def test_block_1_is_not_shared_under_another_block_0():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 3)
    store(cache, pool, [10, 20, 30, 40, 50, 60])
    assert cache.match([10, 20, 30, 40, 50, 60, 1])[0] == [0, 1]
    assert cache.match([77, 88, 99, 40, 50, 60, 1])[0] == []


# ── match and register ────────────────────────────────────────────────────────────────────────────


def store(cache, pool, tokens, salt=None) -> list[int]:
    """What the engine does for a prompt of its own: match, share, allocate, register; returns the
    table."""
    size = cache.block_size
    hits, prefix = cache.match(tokens, salt)
    pool.share(hits)
    table = hits + pool.allocate(-(-len(tokens) // size) - len(hits))
    for index in range(len(hits), len(tokens) // size):
        prefix = cache.register(prefix, tokens[index * size:(index + 1) * size], table[index])
    return table


def release(pool, table) -> None:
    pool.free(reversed(table))


@pytest.mark.parametrize("length, hits", [(0, 0), (1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2),
                                          (12, 2), (13, 3)])
def test_at_least_one_token_is_always_computed(length, hits):
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    store(cache, pool, list(range(16)))
    assert len(cache.match(list(range(length)))[0]) == hits


def test_once_a_block_misses_all_later_ones_miss():
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    table = store(cache, pool, [1, 2, 3, 4, 5, 6])
    release(pool, table)
    taken = pool.allocate(6)  # blocks 3 to 7, then the first freed: the tail
    assert taken[-1] == table[2]
    assert cache.match([1, 2, 3, 4, 5, 6, 7])[0] == table[:2]
    pool.share([table[1]])  # now take the head and leave the middle
    assert pool.allocate(1) == [table[0]]
    assert cache.match([1, 2, 3, 4, 5, 6, 7])[0] == []


def test_match_changes_nothing():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    release(pool, store(cache, pool, [1, 2, 3, 4, 5]))
    before = (list(pool.ref_cnt), pool.free_queue(), len(cache))
    cache.match([1, 2, 3, 4, 9])
    cache.match([8, 8, 8])
    assert (list(pool.ref_cnt), pool.free_queue(), len(cache)) == before


def test_only_full_blocks_that_are_held_are_registered():
    pool = BlockPool(2)
    cache = PrefixCache(pool, 2)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="1 tokens of 2"):
        cache.register(cache.root(), [1], block)
    cache.register(cache.root(), [1, 2], block)
    with pytest.raises(ValueError, match="registered for other tokens"):
        cache.register(cache.root(), [3, 4], block)
    cache.register(cache.root(), [1, 2], block)  # the same again is no news
    assert len(cache) == 1
    with pytest.raises(ValueError, match="block 1"):
        cache.register(cache.root(), [1, 2], 1)  # free: its contents are nobody's


def test_a_block_size_below_1_is_refused():
    with pytest.raises(ValueError, match="block_size is 0"):
        PrefixCache(BlockPool(1), 0)


# ── three ways a block is served, and what is evicted ─────────────────────────────────────────────


def test_allocate_reuse_reactivate():
    """Prompts of 406 and 409 tokens over a pool with 2,234 free blocks of 256."""
    trace = Trace()
    pool = BlockPool(2234, trace)
    cache = PrefixCache(pool, 256)
    common = [i % 251 for i in range(300)]
    first = store(cache, pool, common + [1] * 106)
    assert (first, pool.num_free()) == ([0, 1], 2232)
    second_prompt = common + [2] * 109
    second = store(cache, pool, second_prompt)
    assert (second, pool.num_free(), pool.ref_cnt[0]) == ([0, 2], 2231, 2)
    release(pool, first)
    release(pool, second)
    assert [(e["event"].removeprefix("KV_BLOCK_"), e["block"], e["free"]) for e in trace.events
            if "block" in e] == [("ALLOCATE", 0, 2233), ("ALLOCATE", 1, 2232), ("REUSE", 0, 2232),
                                 ("ALLOCATE", 2, 2231), ("RELEASE", 1, 2232), ("RELEASE", 2, 2233),
                                 ("RELEASE", 0, 2234)]
    third = store(cache, pool, second_prompt)  # block 0 is free, its contents are intact
    assert third == [0, 3]
    assert trace.select("KV_BLOCK_REACTIVATE")[0]["ref_cnt"] == 1


def test_the_engine_serves_two_prompts_of_one_step_alike():
    trace = Trace()
    runner = OracleRunner(2234, 256)
    engine = Engine(EngineConfig(num_blocks=2234, block_size=256), runner, trace=trace)
    common = [i % 251 for i in range(300)]
    for tail in ([1] * 106, [2] * 109):
        engine.add_request(common + tail, SamplingParams(max_tokens=1))
    outputs = engine.step()
    assert [output.num_cached_tokens for output in outputs] == [0, 256]
    assert runner.num_computed_tokens == 406 + 409 - 256
    assert [(e["event"].removeprefix("KV_BLOCK_"), e["block"], e["free"]) for e in trace.events
            if "block" in e] == [("ALLOCATE", 0, 2233), ("ALLOCATE", 1, 2232), ("REUSE", 0, 2232),
                                 ("ALLOCATE", 2, 2231), ("RELEASE", 1, 2232), ("RELEASE", 2, 2233),
                                 ("RELEASE", 0, 2234)]


def test_a_chunked_first_request_offers_only_what_its_chunk_computes():
    """Two prompts with common blocks in one step, the first of them cut short by the budget."""
    runner = OracleRunner(16, 2)
    engine = Engine(EngineConfig(num_blocks=16, block_size=2, max_num_batched_tokens=5), runner)
    prompts = [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 1]]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=2)) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    for request_id, prompt in zip(ids, prompts):
        assert outputs[request_id].outputs[0].token_ids == truth(prompt, 2)
    assert outputs[ids[1]].num_cached_tokens == 6


def test_what_a_failed_step_should_have_written_is_forgotten():

    class FailsOnce(OracleRunner):
        failed = False

        def execute(self, batch):
            if not self.failed:
                self.failed = True
                raise RuntimeError("out of memory")
            return super().execute(batch)

    runner = FailsOnce(8, 2)
    engine = Engine(EngineConfig(num_blocks=8, block_size=2), runner)
    engine.add_request([1, 2, 3, 1, 2], SamplingParams(max_tokens=2), request_id="a")
    with pytest.raises(RuntimeError):
        engine.step()
    engine.abort("a")
    engine.add_request([1, 2, 3, 1, 3], SamplingParams(max_tokens=2), request_id="b")
    while engine.has_unfinished():
        (output,) = engine.step()
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == truth([1, 2, 3, 1, 3], 2)


@pytest.mark.parametrize("length, event", [(255, None), (256, "register"), (257, "allocate"),
                                           (258, None)])
def test_decode_registers_a_block_when_it_is_full_and_then_takes_a_new_one(length, event):
    trace = Trace()
    engine = Engine(EngineConfig(num_blocks=4, block_size=256), OracleRunner(4, 256), trace=trace)
    engine.add_request([1] * (length - 1), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()  # the prompt; its first token is number `length`
    registered, allocated = len(engine.prefix_cache), len(trace.select("KV_BLOCK_ALLOCATE"))
    engine.step()
    assert len(engine.prefix_cache) - registered == (event == "register")
    assert len(trace.select("KV_BLOCK_ALLOCATE")) - allocated == (event == "allocate")


def test_tails_are_evicted_before_heads():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    table = store(cache, pool, [1, 2, 3, 4, 5, 6, 7, 8])
    release(pool, table)
    for kept in (3, 2, 1, 0):
        pool.allocate(1)
        assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9])[0] == table[:kept]


def test_a_hit_moves_a_prefix_to_the_end_of_the_queue():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    a, b = store(cache, pool, [1, 2, 3, 4]), store(cache, pool, [5, 6, 7, 8])
    release(pool, a)
    release(pool, b)
    release(pool, store(cache, pool, [1, 2, 3, 4,
                                      9][:4]))  # touches a; its last block is computed again
    assert pool.free_queue()[-1] == a[0]
    pool.allocate(3)
    assert cache.match([1, 2, 0])[0] == [a[0]]
    assert cache.match([5, 6, 0])[0] == []


# ── what may never be found ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chain",
                         [lambda parent, tokens: 7, lambda parent, tokens: sum(tokens) % 3])
def test_colliding_hashes_cost_time_and_nothing_else(chain):
    rng = random.Random(0)
    for _ in range(40):
        block_size, num_blocks = rng.choice([1, 2, 3]), rng.randint(3, 8)
        runner = OracleRunner(num_blocks, block_size)
        engine = Engine(
            EngineConfig(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=9),
            runner)
        engine.prefix_cache.hash_function = chain
        for _ in range(12):
            prompt = [
                rng.randrange(2) for _ in range(rng.randint(1, (num_blocks - 1) * block_size))
            ]
            engine.add_request(prompt, SamplingParams(max_tokens=1))
            (output,) = engine.step() if len(prompt) <= 9 else [
                o for _ in range(9) for o in engine.step()
            ][-1:]
            assert output.outputs[0].token_ids == truth(prompt, 1)


COLLISION = [10087, 42280, 33584, 30889], [31123, 45802, 32605,
                                           0]  # found in two seconds, see the book


def test_xxh64_collides_on_purpose_and_a_collision_is_no_hit():
    """Two blocks of 16 tokens below 49,152 with one hash: the record behind the hash tells them
    apart."""
    one = [0] * 16
    two = list(one)
    # Only the first of the four lanes differs, and its four words are chosen so that it ends alike.
    one[::4], two[::4] = COLLISION
    assert max(one + two) < 49_152 and one != two
    assert xxh64_chain(None, one) == xxh64_chain(None, two)
    pool = BlockPool(4)
    cache = PrefixCache(pool, 16, xxh64_chain)
    table = store(cache, pool, one)
    assert cache.match(one + [0])[0] == table
    assert cache.match(two + [0])[0] == []
    other = store(cache, pool, two)
    assert cache.match(two + [0])[0] == other and cache.match(one + [0])[0] == table


def test_salts_keep_tenants_apart():
    pool = BlockPool(9)
    cache = PrefixCache(pool, 2)
    tokens = [1, 2, 3, 4, 5]
    tables = {salt: store(cache, pool, tokens, salt) for salt in (None, "red", "blue")}
    for salt, table in tables.items():
        assert cache.match(tokens, salt)[0] == table[:2]
    assert cache.match(tokens, "green")[0] == []
    assert len({table[0] for table in tables.values()}) == 3

    runner = OracleRunner(8, 2)
    engine = Engine(EngineConfig(num_blocks=8, block_size=2), runner)
    for salt, cached in (("red", 0), ("blue", 0), ("red", 4), (None, 0)):
        engine.add_request(tokens, SamplingParams(max_tokens=1), salt=salt)
        (output,) = engine.step()
        assert output.num_cached_tokens == cached


def test_duplicates_are_kept_and_a_held_copy_is_preferred():
    """The last block of a whole-block prompt is always computed, so the same content comes to lie
    in two blocks."""
    pool = BlockPool(6)
    cache = PrefixCache(pool, 2)
    first, second = store(cache, pool, [1, 2, 3, 4]), store(cache, pool, [1, 2, 3, 4])
    assert first == [0, 1] and second == [0, 2]
    release(pool, first)  # block 1 is free now, block 2 is held
    assert cache.match([1, 2, 3, 4, 5])[0] == [0, 2]
    release(pool, second)
    assert len(cache) == 3
    pool.allocate(4)  # 3, 4, 5 and block 1
    assert pool.ref_cnt[1] == 1
    assert cache.match([1, 2, 3, 4, 5])[0] == [0, 2]  # the other copy still serves


def test_records_that_lead_nowhere_are_pruned():
    pool = BlockPool(3)
    cache = PrefixCache(pool, 1)
    rng = random.Random(1)
    for _ in range(300):
        release(pool, store(cache, pool, [rng.randrange(50) for _ in range(3)]))
        records = [record for bucket in cache._records.values() for record in bucket]
        assert len(cache) <= 3
        assert all(record.blocks or record.num_children for record in records)
        assert len(records) <= 3 * 3
    pool.allocate(3)
    assert len(cache) == 0 and not cache._records


def test_a_freed_block_keeps_its_record_until_it_is_handed_out():
    pool = BlockPool(2)
    cache = PrefixCache(pool, 2)
    release(pool, store(cache, pool, [1, 2, 3]))
    assert cache.match([1, 2, 9])[0] == [0]
    pool.allocate(1)  # takes the tail, block 1
    assert cache.match([1, 2, 9])[0] == [0]
    pool.allocate(1)
    assert cache.match([1, 2, 9])[0] == []


# ── the stale entry ───────────────────────────────────────────────────────────────────────────────

A, B, C, TAIL = [1, 2], [3, 4], [5, 6], [7]
STALE = [A + B + TAIL, C + B + TAIL, A, A + B + TAIL]


def test_four_requests_cannot_revive_a_stale_entry():
    """Three blocks of two tokens. B is written after A, then after C into the same block; then A
    comes back.

    A cache that compares the tokens of the block alone takes B's block, written after C, for B
    after A.
    """
    runner = OracleRunner(3, 2)
    engine = Engine(EngineConfig(num_blocks=3, block_size=2), runner)
    cached = []
    for prompt in STALE:
        engine.add_request(prompt, SamplingParams(max_tokens=1))
        (output,) = engine.step()  # the oracle checks every row that is read
        assert output.outputs[0].token_ids == truth(prompt, 1)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 2]


def test_the_books_wrong_manager_fails_on_exactly_this_trace():
    """The chapter's trace is the shortest there is for its manager, and no trace of that length
    breaks ours."""
    manager_class = book_class("prefix-cache", "class OwnTokensOnly")

    def reads_wrong(requests) -> bool:
        manager, rows = manager_class(3, 2), {}
        for prompt in requests:
            table, num_cached = manager.allocate(prompt)
            for position in range(num_cached, len(prompt)):
                rows[table[position // 2], position % 2] = tuple(prompt[:position + 1])
            if any(rows[table[p // 2], p % 2] != tuple(prompt[:p + 1]) for p in range(len(prompt))):
                return True
            manager.free(table)
        return False

    prompts = [A + B + TAIL, C + B + TAIL, A, C, A + TAIL]
    for length in range(1, 4):
        assert not any(map(reads_wrong, itertools.product(prompts, repeat=length)))
    wrong = [requests for requests in itertools.product(prompts, repeat=4) if reads_wrong(requests)]
    assert tuple(STALE) in wrong
    for requests in wrong:
        engine = Engine(EngineConfig(num_blocks=3, block_size=2), OracleRunner(3, 2))
        for prompt in requests:
            engine.add_request(prompt, SamplingParams(max_tokens=1))
            engine.step()


def book_class(chapter: str, first_line: str):
    """A class defined in a code cell of the book."""
    from pathlib import Path

    text = (Path(__file__).parents[1] / "book" / f"{chapter}.md").read_text(encoding="utf-8")
    cells = [cell.split("```")[0].partition("\n")[2] for cell in text.split("```{code-cell}")[1:]]
    (code,) = [cell for cell in cells if first_line in cell]
    code = "\n".join(line for line in code.splitlines() if not line.startswith(":tags:"))
    namespace: dict = {}
    exec(code, namespace)
    return namespace[first_line.split()[1]]
