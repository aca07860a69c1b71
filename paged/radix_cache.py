"""The prefix cache as a radix tree: same questions, same answers as `prefix_cache`, and no hashes.

An edge of the tree holds a run of tokens and, for each block's worth of them, the blocks with their
K and V. Prefixes part where the tree branches. With block size 2 and three prompts that begin
alike:

                       ┌─ 50 60 ─ 70 80          blocks 2, 3
    root ─ 10 20 ─ 30 40                         blocks 0, 1
                       └─ 51 61                  block 4

Looking a prompt up compares runs of tokens, whatever the block size: the cost is in the branches
and not in the blocks. So blocks of one token, dear where each block is hashed, are cheap here.

Follows RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024); unlike there, the order of eviction is the pool's free queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from paged.block_pool import BlockPool
from paged.prefix_cache import Content, check_computed, choose_copy


class Node:
    """A run of tokens after the run of its parent.

    Attributes:
        start: blocks between the root and this run.
        tokens: the run, a multiple of the block size.
        blocks: for each block's worth of tokens, the blocks that hold it now; none after an
            eviction.
        children: the runs that go on from its end, by their first block's tokens.
    """

    __slots__ = ("parent", "start", "tokens", "blocks", "children", "__weakref__")

    def __init__(self, parent: Node | None, start: int, tokens: list[int], blocks: list[list[int]]):
        self.parent, self.start, self.tokens, self.blocks = parent, start, tokens, blocks
        self.children: dict[tuple[int, ...], Node] = {}


class Place:
    """A prefix: the first `depth` blocks of the way from the root to the end of a node.

    A node that is split keeps its lower part, so a place above the split finds its node among the
    parents.
    """

    __slots__ = ("_node", "depth")

    def __init__(self, node: Node, depth: int):
        self._node, self.depth = node, depth

    @property
    def node(self) -> Node:
        """The node in which the prefix ends."""
        while self._node.parent is not None and self.depth <= self._node.start:
            self._node = self._node.parent
        return self._node

    @property
    def parent(self) -> Place:
        """The prefix without its last block."""
        return Place(self._node, self.depth - 1)


class RadixCache:
    """Finds cached blocks by the tokens that lead to them. Arguments and methods are those of
    PrefixCache."""

    def __init__(self, pool: BlockPool, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least one token")
        self.pool, self.block_size = pool, block_size
        self._place_of: dict[int, Place] = {}  # block -> the prefix that it ends
        self._roots = WeakValueDictionary()  # salt -> root, while anything leads to it
        pool.on_allocate = self.forget

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._place_of)

    def root(self, salt: str | None = None) -> Place:
        """The empty prefix. Prefixes under different salts never match: one a tenant keeps them
        apart."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, 0, [], [])
        return Place(root, 0)

    def match(self, token_ids: Sequence[int], salt: str | None = None) -> tuple[list[int], Place]:
        """The longest run of cached full blocks at the start of token_ids, and the prefix where it
        ends."""
        size, place, blocks = self.block_size, self.root(salt), []
        most = (len(token_ids) - 1) // size  # the last token is always computed
        node = place.node
        while len(blocks) < most:
            start = len(blocks)
            child = node.children.get(tuple(token_ids[start * size:(start + 1) * size]))
            if child is None:
                break
            node = child
            for copies in node.blocks[:self._common_blocks(node, token_ids, most)]:
                if not copies:  # once one block misses, all later ones miss
                    break
                blocks.append(choose_copy(copies, self.pool))
            if len(blocks) > start:
                place = Place(node, len(blocks))
            if len(blocks) < start + len(node.blocks):
                break
        return blocks, place

    def continues(self, prefix: Place, tokens: Sequence[int]) -> bool:
        """Whether a block that holds these tokens after the prefix is cached."""
        node, tokens = prefix.node, tuple(tokens)
        index = prefix.depth - node.start
        if index < len(node.blocks):
            here = tuple(node.tokens[index * self.block_size:(index + 1) * self.block_size])
            return here == tokens and bool(node.blocks[index])
        child = node.children.get(tokens)
        return child is not None and bool(child.blocks[0])

    def register(self, prefix: Place, tokens: Sequence[int], block: int) -> Place:
        """Say that `block` now holds the K and V of `tokens` after `prefix`; returns the longer
        prefix."""
        check_computed(self.pool, self.block_size, tokens, block)
        place = self._extended(prefix.node, prefix.depth, tuple(tokens))
        known = self._place_of.get(block)
        if known is None:
            place.node.blocks[prefix.depth - place.node.start].append(block)
            self._place_of[block] = place
            if self.pool.trace.limit:
                self.pool.trace.emit("PREFIX_REGISTER", blocks=[block],
                                     prefix=f"depth {place.depth}")
        elif (known.node, known.depth) != (place.node, place.depth):
            raise ValueError(
                f"block {block} is registered for other tokens and was not handed out since")
        return place

    def forget(self, block: int) -> None:
        """The block is about to hold something else; runs that nothing leads to any more go with
        it."""
        place = self._place_of.pop(block, None)
        if place is None:
            return
        if self.pool.trace.limit:
            self.pool.trace.emit("PREFIX_FORGET", blocks=[block])
        node = place.node
        node.blocks[place.depth - 1 - node.start].remove(block)
        while node.parent is not None and not node.children and not node.blocks[-1]:
            key = tuple(node.tokens[:self.block_size])
            del node.blocks[-1], node.tokens[-self.block_size:]
            if not node.blocks:
                del node.parent.children[key]
                node = node.parent

    def clear(self) -> None:
        """Forget every block. Prefixes handed out before are void."""
        if self.pool.trace.limit:
            self.pool.trace.emit("PREFIX_FORGET", blocks=sorted(self._place_of))
        self._place_of.clear()
        self._roots.clear()

    def contents(self) -> dict[int, Content]:
        """Of each block that can be found, the salt, and all tokens up to its end."""
        found, salts = {}, {root: salt for salt, root in self._roots.items()}
        for block, place in self._place_of.items():
            node, tokens = place.node, []
            while node.parent is not None:
                node, tokens = node.parent, node.tokens + tokens
            found[block] = salts[node], tuple(tokens[:place.depth * self.block_size])
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree and the blocks' places agree."""
        found, nodes = [], list(self._roots.values())
        for node in nodes:  # it grows
            for key, child in node.children.items():
                nodes.append(child)
                assert child.parent is node, f"{child.tokens} has another parent"
                assert child.start == node.start + len(node.blocks), f"{child.tokens} has moved"
                assert len(child.tokens) == len(child.blocks) * self.block_size, "no full blocks"
                assert key == tuple(child.tokens[:self.block_size]), f"{key} is no {child.tokens}"
                assert child.children or child.blocks[-1], f"{child.tokens} leads nowhere"
                found += [(block, (child, child.start + depth))
                          for depth, copies in enumerate(child.blocks, 1) for block in copies]
        assert len(found) == len(dict(found)), f"a block has two places: {found}"
        assert dict(found) == {
            block: (place.node, place.depth)
            for block, place in self._place_of.items()
        }, "a block is found at a place it does not have"

    def _common_blocks(self, node: Node, token_ids: Sequence[int], most: int) -> int:
        """Blocks of the node's run that are also in token_ids, of whose blocks `most` may be
        used."""
        size = self.block_size
        most = min(most - node.start, len(node.blocks))
        mine = list(token_ids[node.start * size:(node.start + most) * size])
        if mine == node.tokens[:len(mine)]:  # nearly always, and as fast as memory is read
            return most
        return next(i for i, (a, b) in enumerate(zip(mine, node.tokens)) if a != b) // size

    def _extended(self, node: Node, depth: int, tokens: tuple[int, ...]) -> Place:
        """The place one block further, made if there is none."""
        size, index = self.block_size, depth - node.start
        if index < len(node.blocks):
            if tuple(node.tokens[index * size:(index + 1) * size]) == tokens:
                return Place(node, depth + 1)
            node = self._split(node, index)
        child = node.children.get(tokens)
        if child is None and node.parent is not None and not node.children:
            node.tokens += tokens  # a leaf grows
            node.blocks.append([])
            return Place(node, depth + 1)
        if child is None:
            child = node.children[tokens] = Node(node, depth, list(tokens), [[]])
        return Place(child, depth + 1)

    def _split(self, node: Node, index: int) -> Node:
        """Let the first `index` blocks of a node's run be a node of their own, above it; returns
        that one."""
        size, parent = self.block_size, node.parent
        assert parent is not None, "the root holds no blocks that could be parted"
        upper = Node(parent, node.start, node.tokens[:index * size], node.blocks[:index])
        parent.children[tuple(upper.tokens[:size])] = upper
        node.parent, node.start = upper, node.start + index
        del node.tokens[:index * size], node.blocks[:index]
        upper.children[tuple(node.tokens[:size])] = node
        return upper
