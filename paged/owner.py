"""One owner of the engine, and callers from any thread.

An engine is not made for threads, and so one thread has it:

    callers    start, ask, close ──► inbox ──► owner: what is in the inbox, a step, again …
       ▲                                         │
       └────────── each call's own box ◄─────────┘ outputs that ended, snapshots that were asked for

The owner steps while a caller waits, and sleeps otherwise. What callers want done is done between
two steps, in the order in which they asked. Ctrl-C strikes a caller, never a step.

A step that fails may have failed because of any of its requests. All of them start over, and each
goes on alone until it has a token more. Which fails alone ends with the error; the others lose time
and nothing else. So each failure brings every request of its step a token or an end.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from paged.call import Call, Closed, News
from paged.engine import Engine
from paged.request import RequestMetrics, RequestOutput


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep Python's garbage collector from walking all of PyTorch between two steps, which takes
    milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Owner:
    """Runs an engine on a thread of its own, which starts with the first call.

    Args:
        engine: from now on for this owner alone, but for an idle one, and for `check_request`.
        step: its step, wrapped or not.

    `post`, `do` and `close` are for any thread, and what they are given runs on the owner's.
    """

    def __init__(self, engine: Engine, step: Callable[[], list[RequestOutput]] | None = None):
        self.engine, self._step = engine, step or engine.step
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()  # garbage may put to it
        self._gate, self._closed, self._over = threading.RLock(), False, False
        self._thread: threading.Thread | None = None
        self._watched: dict[str, tuple[Call, int, RequestOutput]] = {}  # unfinished, by request id
        self._asking: set[Call] = set()
        # Those that may have made a step fail, and the tokens they had; the first one runs alone.
        self._suspects: list[tuple[RequestOutput, int]] = []

    # ── for any thread ────────────────────────────────────────────────────────────────────────────

    def post(self, function: Callable, *args) -> None:
        """Have a function called between two steps. Raises ValueError when the owner is closed."""
        job = partial(function, *args)
        if threading.current_thread() is self._thread:  # a finalizer: it must not wait for the gate
            return self._inbox.put(job)
        with self._gate:
            self.check_open()
            if self._thread is None or not self._thread.is_alive():  # none follows into a fork
                self._thread = threading.Thread(target=self._run, name="paged engine", daemon=True)
                self._thread.start()
            self._inbox.put(job)

    def do(self, function: Callable, *args) -> Any:
        """Have a function called between two steps, and wait for what it returns or raises."""
        reply: SimpleQueue = SimpleQueue()

        def job() -> None:
            try:
                reply.put((function(*args), None))
            except BaseException as error:
                reply.put((None, error))

        self.post(job)
        if threading.current_thread() is self._thread:
            return None
        value, error = reply.get()
        if error is not None:
            raise error
        return value

    def check_open(self) -> None:
        """Raises ValueError when the owner is closed."""
        if self._closed:
            raise Closed("this LLM has been closed: make another one")

    def close(self) -> None:
        """Abort every call, end the thread and let go of the engine."""
        with self._gate:
            if self._closed:
                return
            self._closed, thread = True, self._thread
            self._inbox.put(self._finish)
        if thread is not threading.current_thread():  # else a finalizer: it still needs them
            if thread is not None:
                thread.join()
            del self.engine, self._step

    # ── on the owner's thread ─────────────────────────────────────────────────────────────────────

    def add(self, call: Call) -> None:
        """Queue the requests of a call, which asks for its first news with it."""
        self._asking.add(call)
        for place, (prompt, token_ids, params, salt) in enumerate(call.requests):
            request_id = self.engine.add_checked_request(token_ids, params, salt=salt)
            output = self.engine.output(request_id)
            output.prompt = prompt
            call.outputs.append(output)
            self._watched[request_id] = call, place, output

    def ask(self, call: Call) -> None:
        """A call waits for more."""
        if call.num_left:
            self._asking.add(call)
            self._deliver(call.outputs[0])

    def end(self, call: Call) -> None:
        """A caller has gone."""
        for output in call.outputs:
            if self._watched.get(output.request_id, (None,))[0] is call:
                self.abort(output.request_id)
        self._asking.discard(call)

    def abort(self, request_id: str, error: BaseException | None = None) -> bool:
        """`Engine.abort`; the request's caller hears of it."""
        words = None if error is None else str(error) or type(error).__name__
        aborted = self.engine.abort(request_id, words)
        if request_id in self._watched:
            self._deliver(self._watched[request_id][2], error if aborted else None)
        self._judge()
        return aborted

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what runs is computed again."""
        self.engine.start_over(self._suspects[0][0].request_id if self._suspects else None)
        self._deliver_all()

    def _run(self) -> None:
        while not self._over:
            job = self._inbox.get()  # sleeps: nobody waits for a token
            with short_collections():
                try:
                    job()
                    while self._asking or not self._inbox.empty():
                        for _ in range(self._inbox.qsize()):
                            self._inbox.get()()
                        if self._asking:
                            self._advance()
                except BaseException as error:  # ours, and no request's: nobody shall wait for ever
                    self._drop_all(error)
            del job

    def _advance(self) -> None:
        """A step, and what it leads to."""
        scheduler = self.engine.scheduler
        try:
            for output in self._step():
                self._deliver(output)
        except BaseException as error:
            self._suspect(error, [request.output for request in scheduler.running])
        self._judge()
        if self._watched and not self.engine.has_unfinished():
            self._deliver_all()
            self._drop_all(RuntimeError("the engine was reset while requests ran"))

    def _suspect(self, error: BaseException, running: list[RequestOutput]) -> None:
        """A step has failed: because of the request that ran alone, or of one that ran in it."""
        if self._suspects:
            self.abort(self._suspects[0][0].request_id, error)
            return
        outputs = {output.request_id: output for output in running if not output.finished}
        if not outputs:
            outputs = {name: output for name, (_, _, output) in self._watched.items()}
        self._suspects = [(output, output.metrics.num_output_tokens) for output in outputs.values()]
        if self._suspects:
            self.forget_prefixes()

    def _judge(self) -> None:
        """Those who have run alone, and got a token or an end, are no suspects any more."""
        while self._suspects:
            output, num_tokens = self._suspects[0]
            if not output.finished and output.metrics.num_output_tokens == num_tokens:
                break  # not yet known
            del self._suspects[0]
            self.forget_prefixes()  # and go on with the next one alone, or with all

    def _deliver(self, output: RequestOutput, error: BaseException | None = None) -> None:
        if output.request_id not in self._watched:  # of someone who has the engine step himself
            return
        call, place, _ = self._watched[output.request_id]
        if output.finished:
            del self._watched[output.request_id]
            call.num_left -= 1
            if not call.num_left:
                self._asking.discard(call)
            call.put(News(place, output, error))
        elif call.partial and call in self._asking and (output.metrics.num_output_tokens
                                                        > call.num_seen):
            self._asking.discard(call)
            call.num_seen = output.metrics.num_output_tokens
            call.put(News(place, output.snapshot()))

    def _deliver_all(self) -> None:
        """After requests have started over: some may have ended with what they had."""
        for _, _, output in list(self._watched.values()):
            self._deliver(output)

    def _drop_all(self, error: BaseException) -> None:
        self.engine.reset()
        self._suspects.clear()
        waiting = list(self._watched.values())
        for call in self._asking:  # a call that could not be added whole
            for place in range(len(call.outputs), len(call.requests)):
                nothing = RequestOutput("", call.requests[place].token_ids, [],
                                        RequestMetrics(time.perf_counter()), finished=True)
                waiting.append((call, place, nothing))
        self._asking.clear()
        self._watched.clear()
        for call, place, output in waiting:
            call.num_left -= 1
            call.put(News(place, output, error))

    def _finish(self) -> None:
        self._over = True
        for request_id in list(self._watched):
            self.abort(request_id)
