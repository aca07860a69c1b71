"""Which blocks already hold the K and V of a prefix: match, register, forget.

The K and V of a token depend on every token before it, so a block can be reused only under the very
prefix that wrote it. Prefixes are therefore chained: the hash of a block covers its tokens and the
hash of the block before it.

    tokens     10 20 30 │ 40 50 60          77 88 99 │ 40 50 60
    hash       h1 = H(10 20 30)             g1 = H(77 88 99)
               h2 = H(h1, 40 50 60)         g2 = H(g1, 40 50 60)       h2 ≠ g2: nothing is shared

A hash only finds candidates. What decides is the record behind it: it holds its own tokens and
points to the record of the prefix before it, and a candidate counts only if both are the ones
looked for. So colliding hashes cost a comparison, never a wrong answer.

Only full blocks are registered, and never before the step that computes them. A freed block keeps
its record until the pool hands it out for other contents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

from paged.block_pool import BlockPool

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment] # a bare Python, as in a browser

HashFunction = Callable[["int | None", Sequence[int]], int]


def _chain_bytes(parent: int | None, tokens: Sequence[int]) -> bytes:
    head = b"" if parent is None else parent.to_bytes(8, "little")
    return head + array("q", tokens).tobytes()


def xxh64_chain(parent: int | None, tokens: Sequence[int]) -> int:
    """h = xxh64(parent as 8 little-endian bytes, tokens as int64): fast, and easy to collide on
    purpose."""
    return xxhash.xxh64_intdigest(_chain_bytes(parent, tokens))


def sha256_chain(parent: int | None, tokens: Sequence[int]) -> int:
    """The first 8 bytes of SHA-256 over the same bytes: slower, and nobody knows how to collide
    them."""
    return int.from_bytes(hashlib.sha256(_chain_bytes(parent, tokens)).digest()[:8], "little")


def default_chain() -> HashFunction:
    """xxHash where it is installed, SHA-256 elsewhere."""
    return sha256_chain if xxhash is None else xxh64_chain


def check_computed(pool: BlockPool, block_size: int, tokens: Sequence[int], block: int) -> None:
    """Raise ValueError unless the tokens fill a block and somebody holds it."""
    if len(tokens) != block_size:
        raise ValueError(
            f"only full blocks are registered: got {len(tokens)} tokens of {block_size}")
    if not pool.ref_cnt[block]:
        raise ValueError(f"block {block} is free: nobody can have computed it")


def choose_copy(blocks: Sequence[int], pool: BlockPool) -> int:
    """One of several blocks with the same content: a held one, so that the free ones are left to
    others."""
    return next((block for block in blocks if pool.ref_cnt[block]), blocks[0])


Content = tuple["str | None", tuple[int, ...]]


def check_names(contents: Mapping[int, Content], requests: Iterable, block_size: int) -> None:
    """Raise AssertionError unless each block of the requests' tables that has a name is full, and
    is named by the very tokens that they say it holds."""
    for request in requests:
        # A fork computes its last token again, in a block that is full.
        computed = request.num_computed_tokens + request.may_share_tail
        for end, block in enumerate(request.block_table, 1):
            if block in contents:
                assert end * block_size <= computed, f"block {block} of {request} is not full yet"
                own = request.salt, tuple(request.token_ids[:end * block_size])
                assert contents[block] == own, (
                    f"block {block} of {request} holds {own}, and is found as {contents[block]}")


class Prefix:
    """One block's worth of tokens under one prefix: the record that a hash leads to.

    Attributes:
        parent: the record of the block before it; None at the root.
        tokens: the tokens of this block.
        hash: chained over all blocks up to here.
        blocks: the blocks that hold this content now, the same more than once if it was computed
            twice.
    """

    __slots__ = ("parent", "tokens", "hash", "blocks", "num_children", "__weakref__")

    def __init__(self, parent: Prefix | None, tokens: tuple[int, ...], hash: int | None):
        self.parent, self.tokens, self.hash = parent, tokens, hash
        self.blocks: list[int] = []
        self.num_children = 0


class PrefixCache:
    """Finds cached blocks by the tokens that lead to them.

    Args:
        pool: the block pool; its on_allocate is set, so that a block handed out anew is forgotten
            here.
        block_size: tokens a block.
        hash_function: (hash of the parent or None, tokens) -> 64-bit integer. Any function gives
            right answers; a poor one costs time.
    """

    def __init__(self, pool: BlockPool, block_size: int, hash_function: HashFunction | None = None):
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least one token")
        self.pool, self.block_size = pool, block_size
        self.hash_function = hash_function or default_chain()
        self._records: dict[int | None,
                            list[Prefix]] = {}  # hash -> records: several if they collide
        self._record_of: dict[int, Prefix] = {}  # block -> the record it holds
        self._roots = WeakValueDictionary()  # salt -> root, while anything leads to it
        pool.on_allocate = self.forget

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._record_of)

    def root(self, salt: str | None = None) -> Prefix:
        """The empty prefix. Prefixes under different salts never match: one a tenant keeps them
        apart."""
        root = self._roots.get(salt)
        if root is None:
            hash = None if salt is None else self.hash_function(None, list(salt.encode()))
            root = self._roots[salt] = Prefix(None, (), hash)
        return root

    def match(self, token_ids: Sequence[int], salt: str | None = None) -> tuple[list[int], Prefix]:
        """The longest run of cached full blocks at the start of token_ids, and the prefix where it
        ends.

        The last token is never matched: its hidden state is needed to choose the next one, so at
        least one token is always computed. Nothing is changed: the caller takes the blocks with
        `BlockPool.share`.
        """
        blocks, prefix = [], self.root(salt)
        for tokens in self._full_blocks(token_ids[:-1]):
            found = self._find(prefix, tokens, self.hash_function(prefix.hash, tokens))
            if found is None or not found.blocks:  # once one block misses, all later ones miss
                break
            blocks.append(choose_copy(found.blocks, self.pool))
            prefix = found
        return blocks, prefix

    def continues(self, prefix: Prefix, tokens: Sequence[int]) -> bool:
        """Whether a block that holds these tokens after the prefix is cached."""
        found = self._find(prefix, tuple(tokens), self.hash_function(prefix.hash, tokens))
        return found is not None and bool(found.blocks)

    def register(self, prefix: Prefix, tokens: Sequence[int], block: int) -> Prefix:
        """Say that `block` now holds the K and V of `tokens` after `prefix`; returns the longer
        prefix.

        Call it once the block is full, and computed before anyone can read it. Raises ValueError
        for a block that is not full, is not held, or already stands for something else.
        """
        check_computed(self.pool, self.block_size, tokens, block)
        tokens = tuple(tokens)
        hash = self.hash_function(prefix.hash, tokens)
        record = self._find(prefix, tokens, hash)
        if record is None:
            record = Prefix(prefix, tokens, hash)
            self._records.setdefault(hash, []).append(record)
            prefix.num_children += 1
        known = self._record_of.get(block)
        if known is None:
            record.blocks.append(block)
            self._record_of[block] = record
            if self.pool.trace.limit:
                self.pool.trace.emit("PREFIX_REGISTER", blocks=[block], prefix=f"{hash:016x}")
        elif known is not record:
            raise ValueError(
                f"block {block} is registered for other tokens and was not handed out since")
        return record

    def forget(self, block: int) -> None:
        """The block is about to hold something else; records that nothing leads to any more go with
        it."""
        record = self._record_of.pop(block, None)
        if record is None:
            return
        if self.pool.trace.limit:
            self.pool.trace.emit("PREFIX_FORGET", blocks=[block])
        record.blocks.remove(block)
        while record.parent is not None and not record.blocks and not record.num_children:
            bucket = self._records[record.hash]
            bucket.remove(record)
            if not bucket:
                del self._records[record.hash]
            record = record.parent
            record.num_children -= 1

    def clear(self) -> None:
        """Forget every block. Prefixes handed out before are void."""
        if self.pool.trace.limit:
            self.pool.trace.emit("PREFIX_FORGET", blocks=sorted(self._record_of))
        self._records.clear()
        self._record_of.clear()
        self._roots.clear()

    def contents(self) -> dict[int, Content]:
        """Of each block that can be found, the salt, and all tokens up to its end."""
        salts = {root: salt for salt, root in self._roots.items()}
        return {block: _leads_to(record, salts) for block, record in self._record_of.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless records, their links and the blocks' names agree."""
        records = [record for bucket in self._records.values() for record in bucket]
        children, roots = Counter(record.parent for record in records), set(self._roots.values())
        found = [(block, record) for record in records for block in record.blocks]
        assert len(found) == len(dict(found)), f"a block has two names: {found}"
        assert dict(found) == self._record_of, "a block is found under a name it does not have"
        assert len({(record.parent, record.tokens)
                    for record in records}) == len(records), "two records say the same"
        for hash, bucket in self._records.items():
            assert bucket, f"nothing hashes to {hash:016x}"
            for record in bucket:
                assert len(record.tokens) == self.block_size, f"no full block: {record.tokens}"
                assert record.num_children == children[record], f"{record.tokens} lost a child"
                assert record.blocks or record.num_children, f"{record.tokens} leads nowhere"
                parent = record.parent
                assert parent is not None, f"{record.tokens} is a root among the records"
                kept = roots if parent.parent is None else self._records.get(parent.hash, ())
                assert parent in kept, f"{record.tokens} has no parent"
                assert hash == record.hash == self.hash_function(
                    parent.hash, record.tokens), f"{record.tokens} stands under a wrong hash"

    def _full_blocks(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for end in range(size, len(token_ids) + 1, size):
            yield tuple(token_ids[end - size:end])

    def _find(self, parent: Prefix, tokens: tuple[int, ...], hash: int) -> Prefix | None:
        for record in self._records.get(hash, ()):
            if record.parent is parent and record.tokens == tokens:
                return record
        return None


def _leads_to(prefix: Prefix, salts: Mapping[Prefix, str | None]) -> Content:
    tokens: tuple[int, ...] = ()
    while prefix.parent is not None:
        tokens, prefix = prefix.tokens + tokens, prefix.parent
    return salts[prefix], tokens
