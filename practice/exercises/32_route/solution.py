import math
from itertools import takewhile


def route(hashes: list[str], cached: list[set[str]], loads: list[int], bound: float) -> int:
    """The replica with room that has the longest prefix of the prompt."""
    if bound < 1:
        raise ValueError(f"bound is {bound}: below 1 there may be no replica with room")
    most = math.ceil(bound * (sum(loads) + 1) / len(loads))
    with_room = [replica for replica, load in enumerate(loads) if load + 1 <= most]

    def rank(replica: int) -> tuple[int, int]:
        matched = sum(1 for _ in takewhile(cached[replica].__contains__, hashes))
        return -matched, loads[replica]

    return min(with_room, key=rank)
