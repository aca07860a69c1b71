"""The engine: schedule, run, update, once a step.

It knows nothing of tensors. `runner` is any object with `execute(batch) -> list[int]`: a model on a
GPU, or a few lines in a test that remember which prefix wrote each row.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from operator import index

from paged.batch import Batch
from paged.beam_search import BeamSearch
from paged.block_pool import BlockPool
from paged.config import EngineConfig, checked_prompt
from paged.metrics import step_figures
from paged.prefix_cache import PrefixCache
from paged.radix_cache import RadixCache
from paged.request import PENDING, CompletionOutput, Request, RequestMetrics, RequestOutput, Status
from paged.sampling import BeamSearchParams, SamplingParams
from paged.scheduler import Scheduler
from paged.trace import NO_TRACE, Trace

PREFIX_CACHES = {"hash": PrefixCache, "radix": RadixCache}


class Engine:
    """Takes requests at any time and advances them all by a step at a time.

    Args:
        config: sizes and policies.
        runner: has `execute(batch) -> list[int]`, one token a request of the batch; the token of a
            request whose prompt is not yet computed is ignored. A runner that can work while the
            CPU schedules says `runs_ahead = True` and has `launch(batch) -> handle` and
            `collect(handle) -> list[int]`; an input id of PENDING is the token that the request's
            launch before this one has sampled.
        tokenizer: has `token_bytes`; needed for text and stop strings only.
        eos_token_ids: tokens that end a request unless it says ignore_eos.
        vocab_size: prompts with other token ids are refused; None accepts any.
        trace: receives every event.
    """

    def __init__(self, config: EngineConfig, runner, tokenizer=None,
                 eos_token_ids: Iterable[int] = (), vocab_size: int | None = None,
                 trace: Trace = NO_TRACE):
        self.config, self.runner, self.tokenizer = config, runner, tokenizer
        self.eos_token_ids, self.vocab_size, self.trace = frozenset(
            eos_token_ids), vocab_size, trace
        self._runs_ahead = getattr(runner, "runs_ahead", False)
        self._launch, self._collect = ((runner.launch, runner.collect) if self._runs_ahead else
                                       (runner.execute, lambda tokens: tokens))
        self._num_added = 0
        self._random = random.Random(config.seed)
        self._build()

    def _build(self) -> None:
        """An empty engine: every block free, no request."""
        config = self.config
        self.block_pool = BlockPool(config.num_blocks, self.trace)
        self.prefix_cache = (PREFIX_CACHES[config.prefix_cache](self.block_pool, config.block_size)
                             if config.enable_prefix_caching else None)
        host_pool = (BlockPool(config.num_host_blocks or config.num_blocks)
                     if config.preemption == "swap" else None)
        self.scheduler = Scheduler(self.block_pool, config.block_size, self.prefix_cache,
                                   config.max_num_seqs, config.max_num_batched_tokens, host_pool,
                                   self.trace)
        self._groups: dict[str, list[Request]] = {}  # unfinished requests of each request id
        self._in_flight: deque[tuple[Batch, object, list[int]]] = deque()
        self._num_in_step = 0  # unfinished requests that cannot be run ahead

    # ── requests
    # ──────────────────────────────────────────────────────────────────────────────────────

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None,
                    request_id: str | None = None, salt: str | None = None) -> str:
        """Queue a request and return its id.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample; the default SamplingParams if None.
            request_id: a name of the caller's choosing; numbered from 0 if None.
            salt: only requests with the same salt share blocks.

        Raises ValueError for a request that can never be served, with the numbers and the way out.
        """
        params = SamplingParams() if params is None else params
        return self.add_checked_request(self.check_request(prompt_token_ids, params), params,
                                        request_id, salt)

    def add_checked_request(self, prompt: list[int], params: SamplingParams,
                            request_id: str | None = None, salt: str | None = None) -> str:
        """`add_request` for a prompt as `check_request` has returned it."""
        for name, value in (("request_id", request_id), ("salt", salt)):
            if not isinstance(value, (str, type(None))):
                raise ValueError(f"{name} is {value!r}: it must be a string, or None")
        if request_id is None:
            request_id = next(
                name for name in map(str, count(self._num_added)) if not self._in_use(name, params))
        if self._in_use(request_id, params):
            raise ValueError(
                f"request id {request_id!r} is in use: choose another or let it finish first")
        order = self._num_added
        self._num_added += 1
        base_seed = self._random.getrandbits(62) if params.seed is None else params.seed
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        output = RequestOutput(request_id, prompt, [CompletionOutput(i) for i in range(params.n)],
                               RequestMetrics(arrival_time=time.perf_counter()))
        group = []
        for number, completion in enumerate(output.outputs):
            name = request_id if number == 0 else f"{request_id}.{number}"
            if params.logprobs is not None:
                completion.logprobs = []
            group.append(
                Request(name, (order, number), list(prompt), params, output, completion,
                        base_seed + number, salt, stop_token_ids, self._detokenizer(params)))
        if isinstance(params, BeamSearchParams):
            group[0].beams = BeamSearch(group[0])
            group = group[0].beams.live
        self._groups[request_id] = group
        self._num_in_step += _needs_every_token(params)
        self.scheduler.add(group[0])  # the others fork from it later
        return request_id

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as a list of ints; refuses (ValueError) what add_request refuses, and queues
        nothing."""
        prompt = checked_prompt(prompt_token_ids, params, self.config, self.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer: this engine has none, use stop_token_ids")
        return prompt

    def _in_use(self, request_id: str, params: SamplingParams) -> bool:
        """Whether a batch could show this id, or one of its completions (id.1 and so on), twice."""
        forks = lambda p: p.n > 1 or isinstance(p, BeamSearchParams)  # noqa: E731
        parent = self._groups.get(request_id.rpartition(".")[0])
        return (request_id in self._groups or parent is not None and forks(parent[0].params) or
                forks(params) and any(name.startswith(f"{request_id}.") for name in self._groups))

    def output(self, request_id: str) -> RequestOutput:
        """The state of an unfinished request, alive and up to date. Raises KeyError for an unknown
        id."""
        return self._groups[request_id][0].output

    def abort(self, request_id: str) -> bool:
        """End a request at any moment and release its blocks; False if no unfinished request has
        this id."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if group[0].beams is not None:
            group[0].output.outputs = [beam.completion for beam in group]
        for request in list(group):
            self._finish(request, "abort")
        return True

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._groups)

    def reset(self) -> None:
        """Drop every request, whatever an interruption left behind; the prefix cache survives if it
        can."""
        self._in_flight.clear()
        try:
            for request_id in list(self._groups):
                self.abort(request_id)
            self.check_integrity()
            assert not self._groups and self.block_pool.num_free() == self.config.num_blocks
        except Exception:  # caught in the middle of an update: start afresh
            for request in [*chain(*self._groups.values()), *self.scheduler.running]:
                # Nothing that a runner keeps for it is needed any more
                request.status = Status.FINISHED
            self._build()

    # ── one step
    # ──────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> list[RequestOutput]:
        """Advance by one step; returns the requests that advanced or ended, each alive and up to
        date.

        A runner with `launch` and `collect` is kept one step ahead: this step is launched before
            the tokens
        of the one before are read, and what is returned is the step before.

        If the runner fails, its exception passes through, and every unfinished request goes back to
        waiting with nothing computed: the engine can go on, or the requests be aborted.
        """
        self.trace.step += 1
        start, preemptions = time.perf_counter(), self.scheduler.num_preemptions
        outputs: dict[str, RequestOutput] = {}
        figures = None
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                if self.trace.limit:
                    figures = step_figures(self.scheduler, batch, preemptions)
                handle = self._launch(batch)
                self._in_flight.append((batch, handle, self.scheduler.advance()))
            ahead = int(batch is not None and self._runs_ahead and not self._num_in_step)
            while len(self._in_flight) > ahead:
                batch, handle, contexts = self._in_flight.popleft()
                tokens = list(map(index,
                                  self._collect(handle)))  # ints, whatever the runner counts in
                if len(tokens) != len(batch.requests):
                    raise ValueError(f"the runner returned {len(tokens)} tokens for "
                                     f"{len(batch.requests)} requests")
                self._update(batch, contexts, tokens, outputs)
        except BaseException:
            self._start_over()
            raise
        if not self._groups:  # a step run ahead for requests that have ended
            self._in_flight.clear()
        if figures is not None:
            self.trace.emit("STEP", seconds=time.perf_counter() - start, **figures)
        return list(outputs.values())

    def _start_over(self) -> None:
        """Put every unfinished request back to waiting with nothing computed, whatever was
        interrupted."""
        self._in_flight.clear()
        try:
            self.scheduler.recompute_all()
            self.check_integrity()
        except Exception:  # in the middle of an update: trust only the groups
            groups = {request_id: group for request_id, group in self._groups.items() if group}
            self._build()
            self._groups = groups
            for group in groups.values():
                self._num_in_step += _needs_every_token(group[0].params)
                for request in group:
                    request.num_seats = 1  # forked or not, each goes on by itself
                    request.start_over()
                    self.scheduler.add(request)
        for group in list(self._groups.values()):
            if group[0].beams is not None:
                for beam in group[1:]:
                    self.scheduler.finish(beam)
                group[0].beams.restart()
            else:
                for request in list(group):  # one may have been on its way out
                    self._finish_if_complete(request)

    def _update(self, batch: Batch, contexts: list[int], tokens: Sequence[int],
                outputs: dict[str, RequestOutput]) -> None:
        """Enter what a step computed: full blocks, tokens, forks, ends."""
        now = time.perf_counter()
        block_size, running, finished = self.config.block_size, Status.RUNNING, Status.FINISHED
        for request, computed, token, logprobs in zip(batch.requests, contexts, tokens,
                                                      batch.logprobs or repeat(None)):
            status, output, token_ids = request.status, request.output, request.token_ids
            if status is finished:  # ended after this step was launched
                continue
            if request.detokenizer is not None and output.request_id not in outputs:
                for completion in output.outputs:
                    completion.new_text = ""  # whatever an earlier step added
            outputs[output.request_id] = output
            if computed // block_size > request.num_registered_blocks and status is running:
                self.scheduler.register_computed(request,
                                                 computed)  # not if preempted since: no blocks
            if computed == len(token_ids):
                token_ids.append(token)
            elif token_ids[computed] == PENDING:
                token_ids[computed] = token
            else:
                continue  # in the middle of its prompt: no token yet
            if request.beams is not None:
                self._advance_beams(request, logprobs)
                continue
            if request.num_seats > 1:
                self._fork_completions(request)
            completion, metrics = request.completion, output.metrics
            completion.token_ids.append(token)
            metrics.num_output_tokens += 1
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            if completion.logprobs is not None and logprobs is not None:
                completion.logprobs.append(logprobs)
            if request.detokenizer is not None:
                completion.new_text = self._new_text(request, token)
                completion.text += completion.new_text
            self._finish_if_complete(request)

    def _new_text(self, request: Request, token: int) -> str:
        """The text that this token makes certain; at the end of the request, all that was held
        back."""
        detokenizer = request.detokenizer
        stopped = token in request.stop_token_ids
        text = "" if stopped else detokenizer.push(token)
        if stopped or len(request.completion.token_ids) == request.params.max_tokens:
            text += detokenizer.finish()
        return text

    def _finish_if_complete(self, request: Request) -> None:
        tokens, detokenizer = request.completion.token_ids, request.detokenizer
        if not tokens:
            return
        matched = detokenizer is not None and detokenizer.matched is not None
        if matched or tokens[-1] in request.stop_token_ids:
            self._finish(request, "stop")
        elif len(tokens) == request.params.max_tokens:
            self._finish(request, "length")

    def _advance_beams(self, beam: Request, logprobs: dict[int, float] | None) -> None:
        """Take what a beam offers; once all beams have, the best continuations go on, or the search
        ends."""
        search, output = beam.beams, beam.output
        beam.token_ids.pop()  # the likeliest token is only one of the candidates
        if output.metrics.first_token_time is None:
            output.metrics.first_token_time = time.perf_counter()
        if search.offer(beam, logprobs) and search.advance(self.scheduler):
            output.outputs = search.completions(self.tokenizer)
            output.metrics.memory_saved = search.memory_saved()
            output.metrics.num_output_tokens = sum(len(c.token_ids) for c in output.outputs)
            output.metrics.longest_output = max(len(c.token_ids) for c in output.outputs)
            for request in list(search.live):
                self._finish(request, "length")

    def _fork_completions(self, parent: Request) -> None:
        """The prompt is computed: let the other completions run over its blocks."""
        parent.num_seats = 1
        for child in self._groups[parent.output.request_id]:
            if child is not parent:
                child.num_seats = 1
                self.scheduler.fork(parent, child)

    def _finish(self, request: Request, reason: str) -> None:
        group = self._groups[request.output.request_id]
        request.completion.finish_reason = reason
        metrics = request.output.metrics
        if request.beams is None:
            metrics.longest_output = max(metrics.longest_output, len(request.completion.token_ids))
        if len(group) == 1:
            request.output.finished = True
            metrics.finish_time = time.perf_counter()
        group.remove(request)
        if request.block_table or request in self.scheduler.waiting:
            self.scheduler.finish(request)
        if not group:
            del self._groups[request.output.request_id]
            self._num_in_step -= _needs_every_token(request.params)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, tables, queues and counts agree; run between steps."""
        self.scheduler.check_integrity()
        scheduled = set(self.scheduler.waiting + self.scheduler.running)
        for group in self._groups.values():
            assert group, "a request without completions never ends"
            for request in group:
                forks_later = group[0].num_seats > 1 and request is not group[0]
                assert (request in scheduled) != forks_later, f"{request} is lost"
        assert len(scheduled) <= sum(map(
            len, self._groups.values())), "a finished request is still scheduled"

    def _detokenizer(self, params: SamplingParams):
        if self.tokenizer is None:
            return None
        from paged.detokenizer import Detokenizer
        return Detokenizer(self.tokenizer, params.stop_strings)


def _needs_every_token(params: SamplingParams) -> bool:
    """Whether a request's next step depends on its earlier tokens being known on the CPU."""
    return params.n > 1 or params.repetition_penalty != 1 or isinstance(params, BeamSearchParams)
