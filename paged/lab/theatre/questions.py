"""What a reader can be asked before a beat is shown."""

from __future__ import annotations

from paged.lab.theatre.replay import GIVEN_UP, Replay

HANDED_OUT = ("KV_BLOCK_ALLOCATE", "PREFIX_FORGET")
FOUND = ("KV_BLOCK_REUSE", "KV_BLOCK_REACTIVATE")


def question(replay: Replay, index: int) -> dict | None:
    """What can be predicted before this beat: {question, options, answer}; None if nothing.

    Only the first of several alike is asked for: blocks handed out one after the other, say.
    """
    event = replay.beats[index]["event"]
    last = replay.beats[index - 1]["event"] if index else None
    for events, asked in ((GIVEN_UP, _who_gives_way), (HANDED_OUT, _which_block),
                          (FOUND, _how_many_found), (("KV_BLOCK_COPY",), _whose_table)):
        if event in events:
            return None if last in events else asked(replay, index)
    return None


def _asked(text: str, options: list, answer) -> dict | None:
    """The question, if there is a choice."""
    if len(options) < 2:
        return None
    return {"question": text, "options": list(map(str, options)), "answer": options.index(answer)}


def _which_block(replay: Replay, index: int) -> dict | None:
    fields, queue = replay.beats[index]["fields"], replay.before[index]["queue"]
    block = fields["block"] if "block" in fields else fields["blocks"][0]
    if block not in queue:  # the cache is cleared
        return None
    others = [other for other in (queue[-1], min(queue), max(queue), *queue) if other != block]
    names = {b: f"block {b}" for b in sorted({block, *list(dict.fromkeys(others))[:2]})}
    return _asked("A block is needed. Which one is handed out?", list(names.values()), names[block])


def _how_many_found(replay: Replay, index: int) -> dict | None:
    owner = replay.owner(index, replay.beats[index]["fields"]["block"])
    if owner not in replay.before[index]["requests"]:  # it forks, and looks nothing up
        return None
    request = next(state["requests"][owner] for state in replay.states[index:]
                   if state["requests"][owner]["status"] == "running")
    num_tokens, size = len(request["tokens"]), replay.block_size
    options = sorted({0, request["cached"], num_tokens // size * size, num_tokens})
    return _asked(
        f"{owner} is looked up in the prefix cache. How many of its {num_tokens} tokens need "
        "not be computed?", options, request["cached"])


def _whose_table(replay: Replay, index: int) -> dict | None:
    source = replay.beats[index]["fields"]["source"]
    return _asked(
        f"Block {source} is shared, and one of its holders is about to write. Whose table "
        "changes?", ["the writer's", "everybody else's", "nobody's"], "the writer's")


def _who_gives_way(replay: Replay, index: int) -> dict | None:
    leaving, running = replay.leaving(index), replay.before[index]["running"]
    if leaving is None or leaving[1] == "finished":
        return None
    names = running if leaving[0] in running else [*running, leaving[0]]
    return _asked("A block is needed, and none is free. Who gives way?", names, leaving[0])
