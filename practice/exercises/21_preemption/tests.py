"""Who is preempted, how many, in which order they wait, and what is left alone."""


def survivors(make_room, sizes, name, needed):
    """(answer, running names, waiting names, free blocks) after a request of the given table sizes
    grows."""
    running, block = {}, 0
    for other, size in sizes.items():
        running[other] = list(range(block, block + size))
        block += size
    free, waiting = [], []
    answer = make_room(name, needed, running, free, waiting)
    blocks = sorted(free + [b for table in running.values() for b in table])
    assert blocks == list(range(block)), f"of {block} blocks, {blocks} are left in tables and queue"
    return answer, list(running), waiting, len(free)


def cases():
    yield "enough is free: nobody is preempted", """
        running, free, waiting = {"a": [0], "b": [1]}, [5, 2, 3], ["z"]
        make_room("a", 2, running, free, waiting)       # → True
        running                                         # → {"a": [0, 5, 2], "b": [1]}
        free                                            # → [3]
        waiting                                         # → ["z"]
    """
    yield "nothing needed, nothing done", """
        running, free, waiting = {"a": [0], "b": [1]}, [], []
        make_room("a", 0, running, free, waiting)       # → True
        running                                         # → {"a": [0], "b": [1]}
        waiting                                         # → []
    """
    yield "the youngest goes, though another one would do", """
        survivors(make_room, {"a": 1, "b": 1, "c": 4}, "a", 1)      # → (True, ["a", "b"], ["c"], 3)
    """
    yield "several victims keep their order", """
        running, free, waiting = {"a": [0], "b": [1], "c": [2], "d": [3]}, [], ["e", "f"]
        make_room("a", 3, running, free, waiting)       # → True
        running                                         # → {"a": [0, 3, 2, 1]}
        waiting                                         # → ["b", "c", "d", "e", "f"]
    """
    yield "no more victims than needed", """
        survivors(make_room, {"a": 2, "b": 3, "c": 2, "d": 1}, "a", 3)  # → (
                                                            #    True, ["a", "b"], ["c", "d"], 0)
    """
    yield "the request itself is the youngest", """
        survivors(make_room, {"a": 3, "b": 2}, "b", 1)              # → (False, ["a"], ["b"], 2)
    """
    yield "the younger ones go first, and then it is its own turn", """
        survivors(make_room, {"a": 5, "b": 1, "c": 1}, "b", 2)     # → (False, ["a"], ["b", "c"], 2)
    """
    yield "a request that is its own victim gets nothing, though enough is free afterwards", """
        running, free, waiting = {"a": [0], "b": [1, 2]}, [], []
        make_room("b", 1, running, free, waiting)       # → False
        running                                         # → {"a": [0]}
        free                                            # → [2, 1]
    """
    yield "alone, with too few blocks free", """
        running, free, waiting = {"a": [0, 1]}, [2], []
        make_room("a", 2, running, free, waiting)       # → False
        free                                            # → [2, 1, 0]
        waiting                                         # → ["a"]
    """
    yield "what was free before is handed out before what comes back", """
        running, free, waiting = {"a": [0], "b": [1, 2]}, [3], []
        make_room("a", 2, running, free, waiting)       # → True
        running                                         # → {"a": [0, 3, 2]}
        free                                            # → [1]
    """
    yield "twice in a row", """
        running, free, waiting = {"a": [0], "b": [1], "c": [2]}, [], []
        make_room("a", 1, running, free, waiting)       # → True
        make_room("a", 1, running, free, waiting)       # → True
        running                                         # → {"a": [0, 2, 1]}
        waiting                                         # → ["b", "c"]
    """
    yield "a name that is not running changes nothing", """
        running, free, waiting = {"a": [0]}, [], ["z"]
        make_room("z", 1, running, free, waiting)       # raises ValueError
        (running, free, waiting)                        # → ({"a": [0]}, [], ["z"])
    """
