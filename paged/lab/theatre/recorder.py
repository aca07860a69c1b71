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
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import FrameType

from paged.batch import Batch, RowOutput
from paged.config import EngineConfig
from paged.engine import Engine
from paged.lab.theatre.deltas import apply, delta
from paged.lab.theatre.memory import Fingerprints, Moves, Rows
from paged.lab.theatre.watched import Watched
from paged.lab.theatre.words import tell
from paged.request import Request
from paged.sampling import BeamSearchParams
from paged.trace import Trace

PACKAGE = Path(__file__).resolve().parents[2]
BESIDE = ("trace.py", "lab/theatre/")  # files whose frames tell nothing about the engine
REPORTERS = ("_transition", "trace_batch")  # functions that only report: their caller is shown
HIDDEN = ("PREPARE_PREFILL", "PREPARE_DECODE", "MODEL_WEIGHTS_LOADED", "KV_BUDGET_ESTIMATE")
# The calls inside a runner that stand for what it does: {function: (file or folder, event)}. The
# fused operations write K and V in the kernel that computes them.
ANCHORS = {
    "copy_blocks": ("kv_cache.py", "MOVE"), "copy_between": ("kv_cache.py", "MOVE"),
    "store": ("kv_cache.py", "WRITE"), "rotate_and_store": ("kernels/elementwise.py", "WRITE"),
    "qkv_product": ("kernels/products.py", "WRITE"), "run": ("attention/", "READ"),
    "sample": ("sampler.py", "SAMPLE")
}
FUSED_SAMPLER = "kernels/sample.py"


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
        self._known: dict[str, Request] = {}  # every request seen, by its id
        self._cached: dict[str, int] = {}  # tokens each request found when it was let in
        self._scheduled: dict[str, int] = {}
        self._names: dict[str, str] = {}  # what the prefix cache knows each block as
        self._slots: list = []
        self._frames: dict[tuple, int] = {}
        self._sources: dict[str, list[str]] = {}
        self._calls: dict[str, list[int]] = {}  # of the batch at hand: event -> who called it
        self._in_flight: deque[Moves] = deque()  # launched and not yet collected
        self._last_step = 0
        self._error: BaseException | None = None

    def engine(self, config: EngineConfig, runner, tokenizer=None, **more) -> Engine:
        """An Engine that reports here. Arguments are those of Engine."""
        engine = Engine(config, runner, tokenizer, trace=self, **more)
        if self.limit:
            self.watch(engine)
        return engine

    def watch(self, engine: Engine) -> None:
        """Have an engine report here from now on; what runs in it starts over."""
        config, runner = engine.config, engine.runner
        watched = Watched(runner, self)
        engine.trace, engine.runner = self, watched
        engine.launch = watched.launch if engine.runs_ahead else watched.execute
        engine.collect = watched.collect if engine.runs_ahead else lambda results: results
        engine.start_over()  # pool, caches and scheduler report to the trace that they find
        self._engine, self._pool, size = engine, engine.block_pool, config.block_size
        num_host = ((config.num_host_blocks or config.num_blocks)
                    if config.preemption == "swap" else 0)
        self._rows = Rows(config.num_blocks, size, num_host)
        self._slots = [None] * (config.num_blocks * size)
        kv = getattr(runner, "kv", None)
        self._fingerprints = None if kv is None else Fingerprints(kv)
        self._num_layers = len(kv.k) if kv is not None else None

    def engine_of(self, llm) -> Engine:
        """An Engine like the one inside an LLM, over its model and cache, that reports here."""
        engine = llm.engine
        return self.engine(engine.config, llm.runner, llm.tokenizer,
                           eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size)

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    def emit(self, event: str, **fields) -> None:
        """Record an event, with the state it leaves behind."""
        if self._engine is not None and self._engine.block_pool is not self._pool:
            self._started_over()
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

    def _started_over(self) -> None:
        """A step has failed: pool, prefix cache and queues are new. The rows are as they were."""
        assert self._engine is not None
        self._pool, error = self._engine.block_pool, sys.exc_info()[1]
        if error is not None:
            self.failed(error)
        self._names = {}

    def _beat(self, event: str, fields: dict, at: list[int]) -> None:
        state = self._capture(event, fields)
        self.beats.append({
            "step": self.step, "event": event, "fields": fields, "at": at, "set": delta(
                self._state, state)
        })
        self._state = state

    def _capture(self, event: str, fields: dict) -> dict:
        """The engine as it is now, as plain data that shares nothing with it."""
        engine = self._engine
        assert engine is not None, "there is an engine by the first beat"
        scheduler, pool = engine.scheduler, engine.block_pool
        for request in chain(scheduler.waiting, scheduler.running):
            self._known.setdefault(request.request_id, request)
        if event == "STATE_TRANSITION" and fields["after"] == "running":
            request = self._known[fields["request"]]
            resumed = fields["before"] == "swapped" or request.may_share_tail
            self._cached[fields["request"]] = 0 if resumed else request.num_computed_tokens
        requests = {}
        for name, request in self._known.items():
            after = (fields["after"] if event == "STATE_TRANSITION" and fields["request"] == name
                     else request.status.value)
            requests[name] = {
                "status": after, "tokens": list(request.token_ids),
                "prompt": request.num_prompt_tokens, "computed": request.num_computed_tokens,
                "cached": self._cached.get(name, 0), "table": list(
                    request.block_table), "host": list(request.host_block_table)
            }
        return {
            "ref": list(pool.ref_cnt), "queue": pool.free_queue(), "names": dict(self._names),
            "requests": requests, "waiting": [r.request_id for r in scheduler.waiting], "running": [
                r.request_id for r in scheduler.running
            ], "seats": sum(r.num_seats for r in scheduler.running), "scheduled": dict(
                self._scheduled), "slots": list(self._slots),
            "host": [None if row is None else row.token for row in self._rows.host]
        }

    # ── who emitted it ────────────────────────────────────────────────────────────────────────────

    def _stack(self) -> list[int]:
        """The frames of the package that led here, outermost first, as numbers of frames."""
        return self._callers(sys._getframe(2))

    def _callers(self, frame: FrameType | None) -> list[int]:
        stack = []
        while frame is not None:
            number = self._frame(frame)
            if number is not None:
                stack.append(number)
            frame = frame.f_back
        return stack[::-1]

    def _raised(self, error: BaseException) -> list[int]:
        """The same for an exception: the lines that it has passed through, to where it is now."""
        trace = error.__traceback__
        stack = self._callers(trace.tb_frame.f_back) if trace is not None else []
        while trace is not None:
            number = self._frame(trace.tb_frame, trace.tb_lineno)
            if number is not None:
                stack.append(number)
            trace = trace.tb_next
        return stack

    def _frame(self, frame: FrameType, line: int | None = None) -> int | None:
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
        key = (name, code.co_name, line or frame.f_lineno, source)
        if source not in self._sources:
            lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1:]
            self._sources[source] = [line.rstrip("\n") for line in inspect.getblock(lines)]
        return self._frames.setdefault(key, len(self._frames))

    def _profile(self, frame: FrameType, kind: str, _) -> None:
        """For sys.setprofile: keep who first called each of ANCHORS in this step."""
        if kind != "call" or frame.f_code.co_name not in ANCHORS:
            return
        where, event = ANCHORS[frame.f_code.co_name]
        path = Path(frame.f_code.co_filename)
        if event in self._calls or PACKAGE not in path.parents:
            return
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith((where, FUSED_SAMPLER) if event == "SAMPLE" else where):
            return
        if event == "MOVE" and not frame.f_locals["pairs"]:  # nothing to move
            return
        self._calls[event] = self._callers(frame.f_back)

    def guarded(self, moves: Moves, function: Callable, *args):
        """Call a function of the runner for a batch, and note the lines that do its parts."""
        before, self._calls = sys.getprofile(), moves.calls
        sys.setprofile(self._profile)
        try:
            try:
                return function(*args)
            finally:
                sys.setprofile(before)
        except BaseException as error:
            self.failed(error, moves)
            raise

    # ── around the runner ─────────────────────────────────────────────────────────────────────────

    def launched(self, batch: Batch) -> Moves:
        """What a batch is about to do."""
        self._in_flight.append(Moves.of(batch))
        return self._in_flight[-1]

    def finished(self, moves: Moves, results: list) -> None:
        """The runner has done it: report its parts, each with what the memory holds then."""
        while self._in_flight.popleft() is not moves:  # nobody wanted the tokens of those before
            pass
        self._calls = moves.calls
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
        self._see(self._looked_at(moves), set())
        counts = [b - a for a, b in zip(moves.starts, moves.starts[1:])]
        self._runner_beat("WRITE", requests=moves.request_ids, slots=moves.slots, counts=counts)
        wrong = self._rows.wrong_reads(moves, texts)
        self._runner_beat("READ", requests=moves.request_ids, lengths=moves.lengths,
                          tables=moves.tables, **({"wrong": wrong} if wrong else {}))
        sampled = [[request, token]
                   for request, result, samples in zip(moves.request_ids, results, moves.samples)
                   if samples for token in _tokens(result)]
        self._runner_beat("SAMPLE", tokens=sampled)

    def failed(self, error: BaseException, moves: Moves | None = None) -> None:
        """Something raised, and the engine starts over. With the moves of the batch that
        did it, the reads that it asked for are checked first."""
        if error is self._error:
            return
        self._error = error
        lost, wrong = list(self._in_flight), []
        self._in_flight.clear()
        for each in lost:
            texts = self._texts(each)
            self._rows.move(each)
            self._rows.write(each, texts)
            if each is moves:
                wrong = self._rows.wrong_reads(each, texts)
                break
        if moves is not None and wrong:
            self._runner_beat("READ", requests=moves.request_ids, lengths=moves.lengths,
                              tables=moves.tables, wrong=wrong)
        for slot in chain.from_iterable(each.slots for each in lost):  # written or not: who knows
            self._rows.rows[slot] = self._slots[slot] = None
        fields = {"error": f"{type(error).__name__}: {error}"}
        super().emit("FAILED", **fields)
        # The state is the last one seen: the engine may have started over already.
        self.beats.append({
            "step": self.step, "event": "FAILED", "fields": fields, "at": self._raised(error),
            "set": None
        })

    def _texts(self, moves: Moves) -> dict[str, tuple]:
        """The salt and the tokens of each request of a batch."""
        known = self._known
        return {name: (known[name].salt, list(known[name].token_ids)) for name in moves.request_ids}

    def _runner_beat(self, event: str, **fields) -> None:
        super().emit(event, **fields)
        self._beat(event, fields, self._calls.get(event) or self._stack())

    def _looked_at(self, moves: Moves) -> list[int]:
        """The slots that are read from the memory after a step: whatever anybody has written."""
        return [i for i, row in enumerate(self._rows.rows) if row is not None]

    def _see(self, slots: list[int], later: set[int]) -> None:
        """Take what these slots hold into the picture; those written later in the step are not
        known now."""
        rows = self._rows.rows
        read = {} if self._fingerprints is None else self._fingerprints.read(slots)
        for slot in slots:
            row = rows[slot]
            known = None if slot in later else row
            self._slots[slot] = None if known is None else [known.token, read.get(slot)]

    # ── the recording ─────────────────────────────────────────────────────────────────────────────

    def recording(self, title: str, line: str = "", slug: str = "run") -> dict:
        """All that was recorded, as plain data for `theatre` and `page`."""
        return self.told(self.copied(title, line, slug))

    def copied(self, title: str, line: str, slug: str) -> dict:
        """What was recorded, without words and sentences, and without a share in what is recorded
        next: to be called where the engine steps."""
        assert self._engine is not None, "nothing is recorded without an engine"
        config, beats = self._engine.config, self._kept()
        return {
            "slug": slug, "title": title, "line": line, "sizes": {
                "num_blocks": config.num_blocks, "block_size": config.block_size,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_num_seqs": config.max_num_seqs, "preemption": config.preemption,
                "prefix_cache": config.prefix_cache if config.enable_prefix_caching else "off",
                "num_layers": self._num_layers, "beams": [
                    name for name, r in self._known.items()
                    if isinstance(r.params, BeamSearchParams)
                ], "layer": self._fingerprints and self._fingerprints.layer
            }, "words": dict.fromkeys(sorted(self._shown(beats))),
            "frames": [[*key] for key in self._frames], "sources": dict(self._sources),
            "beats": beats
        }

    def told(self, recording: dict) -> dict:
        """What `copied` has returned, with its words and sentences."""
        assert self._engine is not None, "nothing is recorded without an engine"
        decode = getattr(self._engine.tokenizer, "decode", None)
        recording["words"] = {
            str(token): str(token) if decode is None else decode([token]) or f"<{token}>"
            for token in recording["words"]
        }
        tell(recording)
        return recording

    def _shown(self, beats: list[dict]) -> set[int]:
        """The tokens that these beats show."""
        tokens = {token for r in self._known.values() for token in r.token_ids if token >= 0}
        for beat in beats:
            if beat["event"] == "SAMPLE":
                tokens |= {token for _, token in beat["fields"]["tokens"]}
        return tokens

    def _kept(self) -> list[dict]:
        """Copies of the beats, for sentences to be added."""
        return [dict(beat) for beat in self.beats]


def _tokens(result) -> list[int]:
    """The tokens in a runner's answer for one request."""
    if isinstance(result, RowOutput):
        result = result.token_ids
    return list(map(int, result if isinstance(result, (list, tuple)) else [result]))


def states(recording: dict) -> Iterator[dict]:
    """The state after each beat of a recording, in order."""
    state: dict = {}
    for beat in recording["beats"]:
        state = apply(state, beat["set"])
        yield state
