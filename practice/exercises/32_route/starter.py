def route(hashes: list[str], cached: list[set[str]], loads: list[int], bound: float) -> int:
    """The replica with room that has the longest prefix of the prompt."""
    raise NotImplementedError
