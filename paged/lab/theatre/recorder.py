"""A trace that also keeps what every event found: the state of the engine, and who emitted it.

    recorder = Recorder()
    engine = recorder.engine(config, runner, tokenizer)      # or recorder.engine_of(llm)
    ...                                                      # add requests, step
    recording = recorder.recording("My run")                 # plain data: `theatre` shows it

A beat is an event and the state right after it, stored as the change from the beat before
(`deltas`). Around the runner the recorder emits events of its own: MOVE (blocks copied or
swapped), WRITE (slots), READ (contexts), SAMPLE (tokens), and FAILED.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from paged.engine import Engine, EngineConfig
from paged.lab.theatre.deltas import apply, delta
from paged.lab.theatre.memory import Fingerprints, Moves, Rows
from paged.lab.theatre.words import tell
from paged.trace import Trace

PACKAGE = Path(__file__).resolve().parents[2]
BESIDE = ("trace.py", "lab/theatre/")  # files whose frames tell nothing about the engine
REPORTERS = ("_transition", "trace_batch")  # functions that only report: their caller is shown
HIDDEN = ("PREPARE_PREFILL", "PREPARE_DECODE", "MODEL_WEIGHTS_LOADED", "KV_BUDGET_ESTIMATE")
# The calls inside a runner that stand for what it does.
ANCHORS = {
    "copy_blocks": "MOVE", "copy_between": "MOVE", "write": "WRITE", "paged_attention": "READ",
    "sample": "SAMPLE"
}
MOVES = ("copy_blocks", "copy_between")  # called with nothing to move, too


class Recorder(Trace):
    """Records a run for the theatre. Slow, and holds every state: for small runs.

    Attributes:
        beats: what was recorded, as it will stand in the recording.
    """

    def __init__(self, limit: int = 1_000_000):
        super().__init__(limit)
        self.beats: list[dict] = []
        self._engine: Engine | None = None
        self._state: dict = {}
        self._known: dict[str, object] = {}  # every request seen, by its id
        self._cached: dict[str, int] = {}  # tokens each request found when it was let in
        self._scheduled: dict[str, int] = {}
        self._names: dict[str, str] = {}  # what the prefix cache knows each block as
        self._slots: list = []
        self._frames: dict[tuple, int] = {}
        self._sources: dict[str, list[str]] = {}
        self._calls: dict[str, list[int]] = {}
        self._last_step = 0
        self._error: BaseException | None = None

    def engine(self, config: EngineConfig, runner, tokenizer=None, **more) -> Engine:
        """An Engine that reports here. Arguments are those of Engine."""
        if not self.limit:
            return Engine(config, runner, tokenizer, trace=self, **more)
        engine = Engine(config, _Watched(runner, self), tokenizer, trace=self, **more)
        self._engine, size = engine, config.block_size
        num_host = ((config.num_host_blocks or config.num_blocks)
                    if config.preemption == "swap" else 0)
        self._rows = Rows(config.num_blocks, size, num_host)
        self._slots = [None] * (config.num_blocks * size)
        kv = getattr(runner, "kv", None)
        self._fingerprints = None if kv is None else Fingerprints(kv)
        self._num_layers = len(kv.k) if kv is not None else None
        self._tokenizer = tokenizer
        return engine

    def engine_of(self, llm) -> Engine:
        """An Engine like the one inside an LLM, over its model and cache, that reports here."""
        engine = llm.engine
        return self.engine(engine.config, llm.runner, llm.tokenizer,
                           eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size)

    # ── events
    # ──────────────────────────────────────────────────────────────────────────────────────

    def emit(self, event: str, **fields) -> None:
        """Record an event, with the state it leaves behind."""
        super().emit(event, **fields)
        if not self.limit or self._engine is None or event in HIDDEN:
            return
        if self.step != self._last_step:
            self._last_step, self._scheduled = self.step, {}
        if event.startswith("SCHEDULE_"):
            self._scheduled.update(zip(fields["requests"], fields["tokens"]))
        elif event == "PREFIX_REGISTER":
            self._names.update(
                (str(block),
                 fields["prefix"][-4:] if len(fields["prefix"]) == 16 else fields["prefix"])
                for block in fields["blocks"])
        elif event == "PREFIX_FORGET":
            for block in fields["blocks"]:
                self._names.pop(str(block), None)
        self._beat(event, fields, self._stack())

    def _beat(self, event: str, fields: dict, at: list[int]) -> None:
        state = self._capture(event, fields)
        self.beats.append({
            "step": self.step, "event": event, "fields": fields, "at": at, "set": delta(
                self._state, state)
        })
        self._state = state

    def _capture(self, event: str, fields: dict) -> dict:
        """The engine as it is now, as plain data that shares nothing with it."""
        scheduler, pool = self._engine.scheduler, self._engine.block_pool
        for request in chain(scheduler.waiting, scheduler.running):
            self._known.setdefault(request.request_id, request)
        if event == "STATE_TRANSITION" and fields["after"] == "running":
            request = self._known.get(fields["request"])
            forked = getattr(request, "may_share_tail", False)
            resumed = fields["before"] == "swapped" or forked
            self._cached[fields["request"]] = 0 if resumed else request.num_computed_tokens
        requests = {}
        for name, request in self._known.items():
            after = (fields["after"] if event == "STATE_TRANSITION" and fields["request"] == name
                     else request.status.value)
            requests[name] = {
                "status": after, "tokens": list(request.token_ids),
                "prompt": request.num_prompt_tokens, "computed": request.num_computed_tokens,
                "cached": self._cached.get(name,
                                           0), "table": list(request.block_table), "host": list(
                                               getattr(request, "host_block_table", ()))
            }
        return {
            "ref": list(pool.ref_cnt), "queue": pool.free_queue(), "names": dict(self._names),
            "requests": requests, "waiting": [r.request_id for r in scheduler.waiting],
            "running": [r.request_id for r in scheduler.running], "seats": sum(
                getattr(r, "num_seats", 1) for r in scheduler.running), "scheduled": dict(
                    self._scheduled), "slots": list(self._slots),
            "host": [None if row is None else row.token for row in self._rows.host]
        }

    # ── who emitted it
    # ──────────────────────────────────────────────────────────────────────────────────────

    def _stack(self) -> list[int]:
        """The frames of the package that led here, outermost first, as numbers of frames."""
        frame, stack = sys._getframe(2), []
        while frame is not None:
            number = self._frame(frame)
            if number is not None:
                stack.append(number)
            frame = frame.f_back
        return stack[::-1]

    def _frame(self, frame) -> int | None:
        code = frame.f_code
        path = Path(code.co_filename)
        if code.co_filename.startswith("fault: "):
            name = code.co_filename
        elif PACKAGE in path.parents:
            name = path.relative_to(PACKAGE).as_posix()
        else:
            return None
        if name.startswith(BESIDE) or code.co_name in REPORTERS or code.co_name.startswith("<"):
            return None
        source = f"{name}:{code.co_firstlineno}"
        key = (name, code.co_name, frame.f_lineno, source)
        if source not in self._sources:
            lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1:]
            self._sources[source] = [line.rstrip("\n") for line in inspect.getblock(lines)]
        return self._frames.setdefault(key, len(self._frames))

    def _profile(self, frame, kind: str, _) -> None:
        """For sys.setprofile: keep who first called each of ANCHORS in this step."""
        if kind == "call" and frame.f_code.co_name in ANCHORS:
            event = ANCHORS[frame.f_code.co_name]
            if frame.f_code.co_name in MOVES and not frame.f_locals.get("pairs"):
                return
            if event not in self._calls and PACKAGE in Path(frame.f_code.co_filename).parents:
                stack, frame = [], frame.f_back
                while frame is not None:
                    stack.append(self._frame(frame))
                    frame = frame.f_back
                self._calls[event] = [number for number in stack[::-1] if number is not None]

    def profiled(self, function: Callable, *args):
        """Call a function of the runner and note the lines that do its parts."""
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            return function(*args)
        finally:
            sys.setprofile(before)

    # ── around the runner
    # ──────────────────────────────────────────────────────────────────────────────────────

    def launched(self, batch) -> tuple[Moves, list[bool]]:
        """What a batch is about to do, and which of its requests get a token by it."""
        self._calls = {}
        ends = [
            batch.positions[end - 1] + 1 >= len(self._known[request].token_ids)
            for request, end in zip(batch.request_ids, batch.query_start_loc[1:])
        ]
        return Moves.of(batch), ends

    def finished(self, moves: Moves, ends: list[bool], tokens: list) -> None:
        """The runner has done it: report its parts, each with what the memory holds then."""
        texts = self._texts(moves)
        moved = sorted({block for _, block in [*moves.copies, *moves.swap_in]})
        self._rows.move(moves)
        if moved or moves.swap_out:
            size = self._rows.block_size
            self._see([b * size + i for b in moved for i in range(size)], set(moves.slots))
            self._runner_beat("MOVE", copies=[list(pair) for pair in moves.copies],
                              swap_out=[list(pair) for pair in moves.swap_out],
                              swap_in=[list(pair) for pair in moves.swap_in])
        if not moves.request_ids:
            return
        self._rows.write(moves, texts)
        self._see([i for i, row in enumerate(self._rows.rows) if row is not None], set())
        counts = [b - a for a, b in zip(moves.starts, moves.starts[1:])]
        self._runner_beat("WRITE", requests=moves.request_ids, slots=moves.slots, counts=counts)
        wrong = self._rows.wrong_reads(moves, texts)
        self._runner_beat("READ", requests=moves.request_ids, lengths=moves.lengths,
                          tables=moves.tables, **({"wrong": wrong} if wrong else {}))
        sampled = [[request, int(token)]
                   for request, given, end in zip(moves.request_ids, tokens, ends) if end
                   for token in (given if isinstance(given, (list, tuple)) else [given])]
        self._runner_beat("SAMPLE", tokens=sampled)

    def failed(self, error: BaseException, moves: Moves | None = None) -> None:
        """Something raised: the run ends here, or starts over. With the moves of the batch that
        did it, the reads that it asked for are checked first."""
        if error is self._error:
            return
        self._error = error
        if moves is not None:
            texts = self._texts(moves)
            self._rows.move(moves)
            self._rows.write(moves, texts)
            wrong = self._rows.wrong_reads(moves, texts)
            if wrong:
                self._runner_beat("READ", requests=moves.request_ids, lengths=moves.lengths,
                                  tables=moves.tables, wrong=wrong)
        self.emit("FAILED", error=f"{type(error).__name__}: {error}")

    def _texts(self, moves: Moves) -> dict[str, tuple]:
        """The salt and the tokens of each request of a batch."""
        known = self._known
        return {
            name: (getattr(known[name], "salt", None), list(known[name].token_ids))
            for name in moves.request_ids
        }

    def _runner_beat(self, event: str, **fields) -> None:
        super().emit(event, **fields)
        self._beat(event, fields, self._calls.get(event) or self._stack())

    def _see(self, slots: list[int], later: set[int]) -> None:
        """Take what these slots hold into the picture; those written later in the step are not
        known now."""
        rows = self._rows.rows
        read = {} if self._fingerprints is None else self._fingerprints.read(slots)
        for slot in slots:
            row = rows[slot]
            known = row is not None and slot not in later
            self._slots[slot] = [row.token, read.get(slot)] if known else None

    # ── the recording
    # ──────────────────────────────────────────────────────────────────────────────────────

    def recording(self, title: str, line: str = "", slug: str = "run") -> dict:
        """All that was recorded, as plain data for `theatre` and `page`."""
        config, decode = self._engine.config, getattr(self._tokenizer, "decode", None)
        tokens = {token for r in self._known.values() for token in r.token_ids}
        tokens |= {
            token
            for beat in self.beats if beat["event"] == "SAMPLE"
            for _, token in beat["fields"]["tokens"]
        }
        recording = {
            "slug": slug, "title": title, "line": line, "sizes": {
                "num_blocks": config.num_blocks, "block_size": config.block_size,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_num_seqs": config.max_num_seqs, "preemption": config.preemption,
                "prefix_cache": config.prefix_cache if config.enable_prefix_caching else "off",
                "num_layers": self._num_layers, "beams": any(
                    getattr(r, "beams", None) for r in self._known.values()),
                "layer": self._fingerprints and self._fingerprints.layer
            }, "words": {
                str(token): str(token) if decode is None else decode([token]) or f"<{token}>"
                for token in sorted(tokens) if token >= 0
            }, "frames": [[*key] for key in self._frames], "sources": dict(self._sources),
            "beats": [dict(beat) for beat in self.beats]
        }
        tell(recording)
        return recording


class _Watched:
    """A runner whose every batch the recorder sees."""

    def __init__(self, runner, recorder: Recorder):
        self._runner, self._recorder = runner, recorder
        if hasattr(runner, "launch"):
            self.launch, self.collect = self._launch, self._collect

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def execute(self, batch) -> list:
        """As the runner's."""
        moves, ends = self._recorder.launched(batch)
        tokens = self._guarded(moves, self._runner.execute, batch)
        self._recorder.finished(moves, ends, list(tokens))
        return tokens

    def _launch(self, batch):
        """As the runner's; what it did is reported when it is collected."""
        seen = self._recorder.launched(batch)
        return seen, self._guarded(seen[0], self._runner.launch, batch)

    def _collect(self, handle) -> list:
        """As the runner's."""
        (moves, ends), inner = handle
        tokens = self._guarded(moves, self._runner.collect, inner)
        self._recorder.finished(moves, ends, list(tokens))
        return tokens

    def _guarded(self, moves: Moves, function: Callable, *args):
        try:
            return self._recorder.profiled(function, *args)
        except BaseException as error:
            self._recorder.failed(error, moves)
            raise


def states(recording: dict):
    """The state after each beat of a recording, in order."""
    state = {}
    for beat in recording["beats"]:
        state = apply(state, beat["set"])
        yield state
