class RadixTree:
    """Prompts stored by their common prefixes, with a slot for each token."""

    def insert(self, token_ids: list[int], slots: list[int]) -> int:
        """Store a prompt; how many of its tokens were there already."""
        raise NotImplementedError

    def match(self, token_ids: list[int]) -> list[int]:
        """The slots of the longest stored prefix."""
        raise NotImplementedError

    def num_nodes(self) -> int:
        """Nodes without the root."""
        raise NotImplementedError
