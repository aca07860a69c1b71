"""A sentence for every beat: what happens, and why; and the questions of the prediction mode.

All of it is derived from the recording: the event, the state before and after it, and what the
run makes of it later (for whom a block was taken, who is put out).
"""

from __future__ import annotations

from paged.lab.theatre.questions import question
from paged.lab.theatre.replay import GIVEN_UP, Replay
from paged.slots import blocks_needed

PHASES = {
    "schedule": ("STATE_TRANSITION", "KV_BLOCK_ALLOCATE", "KV_BLOCK_REUSE", "KV_BLOCK_REACTIVATE",
                 "KV_BLOCK_COPY", "SCHEDULE_PREFILL", "SCHEDULE_DECODE", "ADMISSION_REFUSED",
                 "PREFIX_REGISTER", "PREFIX_FORGET", "SWAP_OUT", "SWAP_IN"), "move": ("MOVE",),
    "write": ("WRITE",), "read": ("READ", "FAILED"), "sample": ("SAMPLE", "STEP"),
    "release": ("KV_BLOCK_RELEASE", "REFERENCE_DROP")
}
PHASE_OF = {event: phase for phase, events in PHASES.items() for event in events}
# What a picture without a player shows first; a run's rare events explain it best.
KEY_EVENTS = ("FAILED", "MOVE", "KV_BLOCK_COPY", "KV_BLOCK_REACTIVATE", "ADMISSION_REFUSED",
              "KV_BLOCK_REUSE", "PREFIX_FORGET", "REFERENCE_DROP", "KV_BLOCK_RELEASE", "WRITE",
              "KV_BLOCK_ALLOCATE", "SAMPLE", "READ")
NUM_KEY_BEATS = 5


def tell(recording: dict) -> None:
    """Give every beat its sentence (`say`), its `phase`, its question (`ask`) if it has one, and
    whoever gives up a block by it (`leaves`); mark the key beats (`key`)."""
    teller = _Teller(recording)
    for index, beat in enumerate(recording["beats"]):
        beat["say"] = teller.sentence(index)
        beat["phase"] = teller.phase(index)
        leaving = teller.leaving(index) if beat["event"] in GIVEN_UP else None
        if leaving and beat["event"] != "SWAP_OUT":
            beat["leaves"] = leaving[0]
        asked = question(teller, index)
        if asked:
            beat["ask"] = asked
    for index in _key_beats(recording["beats"]):
        recording["beats"][index]["key"] = True


def listed(things) -> str:
    """1, 2 and 3"""
    things = list(map(str, things))
    return " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)


def counted(number: int, noun: str) -> str:
    """1 block, 2 blocks"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def runs(numbers) -> str:
    """0 to 4, 8 and 12"""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return listed(
        f"{group[0]} to {group[-1]}" if len(group) > 2 else listed(group) for group in groups)


class _Teller(Replay):

    def sentence(self, index: int) -> str:
        beat = self.beats[index]
        tell = getattr(self, "_" + beat["event"].lower(), None)
        if tell is None:
            return beat["event"]
        return tell(index, beat["fields"], self.before[index], self.states[index])

    def phase(self, index: int) -> str:
        beat = self.beats[index]
        leaves = beat["event"] == "STATE_TRANSITION" and (beat["fields"]["after"]
                                                          in ("finished", "swapped")
                                                          or beat["fields"]["before"] == "running")
        return "release" if leaves else PHASE_OF.get(beat["event"], "schedule")

    def _word(self, token: int) -> str:
        return "“" + (self.words.get(str(token), "?").replace("\n", "⏎").strip() or "␣") + "”"

    def _all_layers(self) -> str:
        layers = self.sizes["num_layers"]
        return f", in each of the {layers} layers" if layers else ""

    # ── a request
    # ────────────────────────────────────────────────────────────────────────────────

    def _state_transition(self, index, fields, before, after) -> str:
        name, was, now = fields["request"], fields["before"], fields["after"]
        step = self.beats[index]["step"]
        request = after["requests"].get(name)
        if was == now and name in before["requests"]:
            return f"{name} was waiting, and waits still."
        if was == now:
            return (f"{name} arrives with {counted(request['prompt'], 'prompt token')} and waits. "
                    "The next step decides whether it is let in.")
        if now == "finished" and request is None:  # it came and went between two steps
            return f"{name} is given up before a step has seen it."
        if now == "finished" and was != "running":
            return f"{name} is given up while it waits."
        if now == "finished" and name in self.sizes["beams"] and self._goes_on(name, step):
            return (f"{name} has lost: none of its continuations is among the best. Its blocks are "
                    "free, unless another beam shares them.")
        if now == "finished":
            generated = len(request["tokens"]) - request["prompt"]
            return (f"{name} has ended, with {counted(generated, 'token')} generated. It holds no "
                    "block any more; what its blocks hold stays there until they are handed out.")
        if now == "running" and was == "swapped":
            return (f"{name} comes back: its K and V return from host memory into blocks "
                    f"{listed(request['table'])}. Nothing is computed again.")
        if now == "running" and name not in before["requests"]:
            return (
                f"{name} forks off: its table, too, names "
                f"{self._blocks(request['table'])}. Nothing is copied before one of the sharers "
                "writes.")
        if now == "running":
            known = request["cached"] // self.block_size
            found = (f"; {known} of them {'was' if known == 1 else 'were'} found in the prefix "
                     "cache") if known else ""
            return (f"{name} is let in, with blocks {listed(request['table'])}{found}."
                    if len(request["table"]) > 1 else
                    f"{name} is let in, with block {listed(request['table'])}{found}.")
        if now == "swapped":
            return (f"{name} is swapped: it runs no more and holds no block. Its K and V will lie "
                    "in host memory, so that it can go on where it stopped.")
        return (f"{name} waits again, in its old place in the order of arrival. Its K and V are "
                f"given up: all its {len(request['tokens'])} tokens will be computed again, or "
                "found in the prefix cache.")

    def _goes_on(self, name: str, step: int) -> bool:
        """Whether other beams of this one's search still run when the step is over."""
        after = [state for beat, state in zip(self.beats, self.states) if beat["step"] == step][-1]
        return any(
            other.partition(".")[0] == name.partition(".")[0] and request["status"] != "finished"
            for other, request in after["requests"].items())

    def _admission_refused(self, index, fields, before, after) -> str:
        known = f", {fields['hits']} of them known" if fields["hits"] else ""
        return (f"{fields['request']} stays out: its tokens need "
                f"{counted(fields['needed'], 'block')}{known}, and only {fields['free']} "
                f"{'is' if fields['free'] == 1 else 'are'} free. All of a prompt must fit, "
                "or none of it is let in.")

    def _swap_out(self, index, fields, before, after) -> str:
        blocks = [block for block, _ in fields["pairs"]]
        return (f"Instead of losing them, {fields['request']} sends {self._blocks(blocks)} to host "
                "memory: copied first, before anybody writes there.")

    def _swap_in(self, index, fields, before, after) -> str:
        blocks = [block for _, block in fields["pairs"]]
        return (f"There is room again for all of {fields['request']}: its rows will be copied "
                f"back from host memory, into {self._blocks(blocks)}.")

    # ── blocks
    # ────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _blocks(blocks) -> str:
        return ("block " if len(blocks) == 1 else "blocks ") + listed(blocks)

    def _kv_block_allocate(self, index, fields, before, after) -> str:
        block, owner = fields["block"], self.owner(index, fields["block"])
        step = self.beats[index]["step"]
        copied = any(beat["event"] == "KV_BLOCK_COPY" and beat["fields"]["block"] == block
                     for beat in self.beats[index:index + 4] if beat["step"] == step)
        text = (f"Block {block} goes" if index and self.beats[index - 1]["event"] == "PREFIX_FORGET"
                else f"Block {block} stands at the head of the free queue and is handed out")
        if owner is None:
            return f"{text}. {counted(fields['free'], 'block')} left."
        text += f" to {owner}: "
        if copied:
            return text + "it is about to write into a shared block, and gets its own."
        later = next(state["requests"][owner] for state in self.states[index:]
                     if block in state["requests"].get(owner, {"table": ()})["table"])
        place = later["table"].index(block)
        first, last = place * self.block_size, (place + 1) * self.block_size - 1
        if later["status"] == "running" and place and owner in before["running"]:
            return text + (
                f"its {f'{place} blocks are' if place > 1 else 'block is'} full, and token "
                f"{first} needs a row.")
        return text + f"a place for its tokens {first} to {last}."

    def _kv_block_reuse(self, index, fields, before, after) -> str:
        block, owner = fields["block"], self.owner(index, fields["block"])
        holders = [name for name in self.holders(before, block) if name != owner]
        counts = f"{fields['ref_cnt']} references now"
        if owner and owner not in before["requests"]:
            return (f"{owner} forks from {listed(holders)} and takes one more reference to block "
                    f"{block}: {counts}, and no copy.")
        return (f"{owner or 'A request'} begins like {listed(holders) or 'another'}: block {block} "
                f"holds the K and V of the very same tokens. {counts}; nothing is computed and "
                "nothing copied.")

    def _kv_block_reactivate(self, index, fields, before, after) -> str:
        block, owner = fields["block"], self.owner(index, fields["block"])
        place = before["queue"].index(block) + 1
        return (f"Block {block} is free but still holds how {owner or 'the prompt'} begins. It is "
                f"taken back out of the queue, where it was number {place} of "
                f"{len(before['queue'])}, contents and all.")

    def _kv_block_copy(self, index, fields, before, after) -> str:
        source, block = fields["source"], fields["block"]
        owner, left = self.owner(index, block), self.holders(after, source)
        owner = owner or next(iter(self.holders(after, block)), "The writer")
        left = [name for name in left if name != owner]
        return (f"{owner} would write into block {source}, which {listed(left) or 'others'} "
                f"{'holds' if len(left) == 1 else 'hold'} too. So {owner}'s table now names block "
                f"{block}, and the rows will be copied there.")

    def _reference_drop(self, index, fields, before, after) -> str:
        (block,), leaving = fields["blocks"], self.leaving(index)
        others = [n for n in self.holders(after, block) if not leaving or n != leaving[0]]
        count = fields["ref_cnt"]
        text = f"One reference to block {block} is given up"
        if leaving:
            text = f"{leaving[0]} gives up block {block}"
        still = f"{listed(others)} still {'hold' if len(others) > 1 else 'holds'} it"
        return (f"{text}, but {still if others else counted(count, 'reference') + ' stay'}: "
                "it is not free.")

    def _kv_block_release(self, index, fields, before, after) -> str:
        block, leaving = fields["block"], self.leaving(index)
        rest = "Its rows stay as they are, " + (
            "and the prefix cache can still find them."
            if str(block) in after["names"] else "but there is no prefix cache here to find them."
            if self.sizes["prefix_cache"] == "off" else "but the prefix cache does not know them.")
        if leaving and leaving[1] != "finished":
            return (f"A block is needed, and none is free. {leaving[0]} is the youngest that runs, "
                    f"so it gives way: block {block} joins the queue. {rest}")
        who = f"{leaving[0]} ends" if leaving else "Nobody needs it any more"
        return f"{who}: block {block} joins the tail of the free queue. {rest}"

    def _prefix_register(self, index, fields, before, after) -> str:
        names = listed(fields["prefix"][-4:] if len(fields["prefix"]) == 16 else fields["prefix"]
                       for _ in fields["blocks"])
        early = self.beats[index]["step"] == self._write_step(index)
        return (f"Block {listed(fields['blocks'])} {'will be' if early else 'is'} full"
                f"{' after this step' if early else ''}: the prefix cache enters it as {names}, "
                "a hash of its tokens and of all before them.")

    def _write_step(self, index: int) -> int | None:
        """The step whose WRITE is still to come, if the beat comes before it."""
        step = self.beats[index]["step"]
        for beat in self.beats[index:]:
            if beat["step"] != step:
                return None
            if beat["event"] == "WRITE":
                return step
        return None

    def _prefix_forget(self, index, fields, before, after) -> str:
        if len(fields["blocks"]) != 1:
            return "The prefix cache forgets every block: nothing counts as computed."
        (block,) = fields["blocks"]
        return (
            f"Block {block}, the head of the free queue, is about to hold something else. So the "
            f"prefix cache forgets {before['names'].get(str(block), 'it')} now: nobody may find "
            "what is about to be overwritten.")

    # ── a step
    # ────────────────────────────────────────────────────────────────────────────────

    def _schedule_prefill(self, index, fields, before, after) -> str:
        parts = []
        for name, tokens in zip(fields["requests"], fields["tokens"]):
            request = after["requests"][name]
            left = len(request["tokens"]) - request["computed"]
            parts.append(f"{tokens} of {name}" if tokens ==
                         left else f"{tokens} of {name}'s {left} that are left")
        tokens = sum(fields["tokens"])
        return (f"Prompt {'token' if tokens == 1 else 'tokens'} to compute in this step: "
                f"{listed(parts)}. The budget of a step is "
                f"{self.sizes['max_num_batched_tokens']} tokens.")

    def _schedule_decode(self, index, fields, before, after) -> str:
        names = fields["requests"]
        return (f"{listed(names)} {'computes' if len(names) == 1 else 'compute'} one token"
                f"{'' if len(names) == 1 else ' each'}, the one chosen last.")

    def _move(self, index, fields, before, after) -> str:
        parts = [f"the rows of block {a} are copied to block {b}" for a, b in fields["copies"]]
        parts += [f"block {a} is copied out to host block {b}" for a, b in fields["swap_out"]]
        parts += [f"host block {a} is copied into block {b}" for a, b in fields["swap_in"]]
        text = listed(parts)
        return f"{text[:1].upper()}{text[1:]}{self._all_layers()}, before anything is written."

    def _write(self, index, fields, before, after) -> str:
        slots = fields["slots"]
        one = len(slots) == 1
        return (f"K and V of {counted(len(slots), 'token')} {'go' if not one else 'goes'} to "
                f"{'slot' if one else 'slots'} {runs(slots)}{self._all_layers()}. The tables say "
                "where.")

    def _read(self, index, fields, before, after) -> str:
        if fields.get("wrong"):
            name, position, slot, why = fields["wrong"][0]
            more = len(fields["wrong"]) - 1
            where = f"slot {slot}" if slot is not None else "a row beyond its table"
            return (f"Wrong: {name} reads {where} as its position {position}, but {why}." +
                    (f" {more} more like it." if more else ""))
        parts = []
        for name, length, table in zip(fields["requests"], fields["lengths"], fields["tables"]):
            blocks = self._blocks(table[:blocks_needed(length, self.block_size)])
            parts.append(f"{name} reads {counted(length, 'row')} in {blocks}")
        through = "its table" if len(parts) == 1 else "their tables"
        return f"Attention: {'; '.join(parts)}, through {through}."

    def _sample(self, index, fields, before, after) -> str:
        if not fields["tokens"]:
            return "No prompt is complete yet: nothing is sampled."
        if all(name in self.sizes["beams"] for name, _ in fields["tokens"]):
            parts = [f"{name} with {self._word(token)}" for name, token in fields["tokens"]]
            return (f"Likeliest: {listed(parts)}. Now the likely continuations of all beams are "
                    "compared, and only the best go on.")
        parts = [f"{name} continues with {self._word(token)}" for name, token in fields["tokens"]]
        return (f"{listed(parts)}. {'Its' if len(parts) == 1 else 'Their'} K and V come a step "
                "later, when the token goes in.")

    def _step(self, index, fields, before, after) -> str:
        parts = [
            f"{name}: {r['computed']} of {counted(len(r['tokens']), 'token')} computed"
            for name, r in after["requests"].items() if r["status"] == "running"
        ]
        return f"Step {self.beats[index]['step']} is over. " + ("; ".join(parts)
                                                                + "." if parts else "Nobody runs.")

    def _kept(self, index, fields, before, after) -> str:
        if fields["dropped"]:
            return (f"The last {counted(fields['steps'], 'step')}. This is how the step before "
                    "them left everything.")
        if len(self.beats) == 1:
            return "Nothing has run yet. This is the engine as it waits."
        return "The engine before its first step."

    def _failed(self, index, fields, before, after) -> str:
        return (
            "The step fails. Only the tokens that were returned are certain, so the engine starts "
            f"over with an empty pool. {fields['error']}")


def _key_beats(beats: list[dict]) -> list[int]:
    """The few beats that tell the run: wrong reads, who is put out, then one a kind of event."""
    chosen = [i for i, beat in enumerate(beats) if beat["fields"].get("wrong")][:1]
    chosen += [
        i for i, beat in enumerate(beats)
        if beat["event"] == "STATE_TRANSITION" and beat["fields"]["before"] == "running"
        and beat["fields"]["after"] in ("waiting", "swapped")
    ][:1]
    for event in KEY_EVENTS:
        if len(chosen) >= NUM_KEY_BEATS:
            break
        found = [i for i, beat in enumerate(beats) if beat["event"] == event and i not in chosen]
        if event == "KV_BLOCK_ALLOCATE":  # later ones tell more
            found.sort(key=lambda i: beats[i]["step"] <= 1)
        chosen += found[:1]
    return sorted(chosen[:NUM_KEY_BEATS])
