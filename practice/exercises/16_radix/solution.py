class _Node:

    def __init__(self, tokens, slots, children):
        self.tokens, self.slots, self.children = tokens, slots, children

    def agrees(self, tokens, start):
        """How many tokens of the run agree with tokens[start:]."""
        count = 0
        while (count < len(self.tokens) and start + count < len(tokens)
               and self.tokens[count] == tokens[start + count]):
            count += 1
        return count

    def split(self, count):
        """Keep `count` tokens and hand the others, and all children, to a new child."""
        lower = _Node(self.tokens[count:], self.slots[count:], self.children)
        self.tokens, self.slots = self.tokens[:count], self.slots[:count]
        self.children = {lower.tokens[0]: lower}


class RadixTree:
    """Prompts stored by their common prefixes, with a slot for each token."""

    def __init__(self):
        self._root = _Node([], [], {})

    def insert(self, token_ids: list[int], slots: list[int]) -> int:
        """Store a prompt; how many of its tokens were there already."""
        if len(token_ids) != len(slots):
            raise ValueError(f"{len(token_ids)} tokens come with {len(slots)} slots")
        node, known = self._root, 0
        while known < len(token_ids) and token_ids[known] in node.children:
            node = node.children[token_ids[known]]
            count = node.agrees(token_ids, known)
            known += count
            if count < len(node.tokens):
                if known < len(token_ids):
                    node.split(count)
                break
        if known < len(token_ids):
            node.children[token_ids[known]] = _Node(list(token_ids[known:]), list(slots[known:]),
                                                    {})
        return known

    def match(self, token_ids: list[int]) -> list[int]:
        """The slots of the longest stored prefix."""
        node, found = self._root, []
        while len(found) < len(token_ids) and token_ids[len(found)] in node.children:
            node = node.children[token_ids[len(found)]]
            count = node.agrees(token_ids, len(found))
            found += node.slots[:count]
            if count < len(node.tokens):
                break
        return found

    def num_nodes(self) -> int:
        """Nodes without the root."""
        waiting, nodes = [self._root], -1
        while waiting:
            nodes += 1
            waiting += waiting.pop().children.values()
        return nodes
