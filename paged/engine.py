"""The engine: schedule, run, enter what came of it, once a step.

It knows nothing of tensors. `runner` is any object with `execute(batch) -> list[int]`: a model on a
GPU, or a few lines in a test that remember which prefix wrote each row. What a token means to its
request is the business of the request's group: `completions.py`, `beam_search.py`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from operator import index

from paged.batch import RowOutput
from paged.beam_search import BeamSearch
from paged.block_pool import BlockPool
from paged.completions import Completions, Group
from paged.config import MAX_TOKEN_ID, EngineConfig, checked_prompt
from paged.metrics import step_figures
from paged.prefix_cache import PrefixCache
from paged.radix_cache import RadixCache
from paged.request import PENDING, Request, RequestMetrics, RequestOutput, Status
from paged.rules import Rules, bad_word_tokens, make_rules
from paged.sampling import BeamSearchParams, SamplingParams
from paged.scheduler import Scheduler
from paged.trace import NO_TRACE, Trace

PREFIX_CACHES = {"hash": PrefixCache, "radix": RadixCache}


class Engine:
    """Takes requests at any time and advances them all by a step at a time.

    Args:
        config: sizes and policies.
        runner: has `execute(batch) -> list`, one entry a request of the batch: a token, a list of
            tokens, or a RowOutput; that of a request whose prompt is not yet computed is ignored. A
            runner that can work while the CPU schedules says `runs_ahead = True` and has
            `launch(batch) -> handle` and `collect(handle) -> list`. One that keeps block tables of
            its own says `needs_lists = False`. One that is an instrument, and wants to see more
            than batches, has `watch(engine)`, which is called once.
        tokenizer: has `token_bytes`, and `encode` for bad words; needed for text only.
        eos_token_ids: tokens that end a request unless it says ignore_eos.
        vocab_size: prompts with other token ids are refused; None accepts any.
        trace: receives every event.

    Attributes:
        launch, collect: the runner's, or its execute and nothing; whoever wants to see or change
            what passes between engine and runner puts a function of his own there.
    """

    def __init__(self, config: EngineConfig, runner, tokenizer=None,
                 eos_token_ids: Iterable[int] = (), vocab_size: int | None = None,
                 trace: Trace = NO_TRACE):
        self.config, self.runner, self.tokenizer = config, runner, tokenizer
        self.eos_token_ids, self.vocab_size, self.trace = frozenset(
            eos_token_ids), vocab_size, trace
        self.runs_ahead = getattr(runner, "runs_ahead", False)
        if hasattr(runner, "watch"):
            runner.watch(self)
        self.launch = runner.launch if self.runs_ahead else runner.execute
        self.collect = runner.collect if self.runs_ahead else lambda results: results
        self._num_added = 0
        self._alone: str | None = None
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
                                   self.trace, getattr(self.runner, "needs_lists", True))
        self._groups: dict[str, Group] = {}  # of unfinished requests, by request id
        self._in_flight: deque[tuple[object, list[tuple[Request, int]]]] = deque()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

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
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        stop_token_ids, rules = self._ends(params), self._rules(params)
        output = RequestOutput(request_id, prompt, [], RequestMetrics(time.perf_counter()))
        group: Group
        if isinstance(params, BeamSearchParams):
            group = BeamSearch(output, params, order, salt, stop_token_ids, self.tokenizer)
        else:
            group = Completions(output, params, order, seed, salt, stop_token_ids, self.tokenizer,
                                rules)
        self._groups[request_id] = group
        if self._alone is None:
            self.scheduler.add(group.live[0])  # the others fork from it later
        return request_id

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as a list of ints; refuses (ValueError) what add_request refuses, and queues
        nothing."""
        prompt = checked_prompt(prompt_token_ids, params, self.config, self.vocab_size)
        if (params.stop_strings or params.bad_words) and self.tokenizer is None:
            raise ValueError("stop strings and bad words need a tokenizer: this engine has none, "
                             "use stop_token_ids")
        self._rules(params)
        return prompt

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a request."""
        ends = frozenset(params.stop_token_ids or ())
        return ends if params.ignore_eos else ends | self.eos_token_ids

    def _rules(self, params: SamplingParams) -> Rules | None:
        known = range(MAX_TOKEN_ID if self.vocab_size is None else self.vocab_size)
        for name in ("logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token not in known:
                    raise ValueError(f"{name} holds token {token}: the vocabulary has {len(known)}")
        words = bad_word_tokens(params, self.tokenizer)
        return make_rules(params, [end for end in self._ends(params) if end in known], words)

    def _in_use(self, request_id: str, params: SamplingParams) -> bool:
        """Whether a batch could show this id, or one of its sequences (id.1 and so on), twice."""

        def forks(params: SamplingParams) -> bool:
            return params.n > 1 or isinstance(params, BeamSearchParams)

        parent = self._groups.get(request_id.rpartition(".")[0])
        return (request_id in self._groups or parent is not None and forks(parent.params) or
                forks(params) and any(name.startswith(f"{request_id}.") for name in self._groups))

    def output(self, request_id: str) -> RequestOutput:
        """The state of an unfinished request, alive and up to date. Raises KeyError for an unknown
        id."""
        return self._groups[request_id].output

    def abort(self, request_id: str, error: str | None = None) -> bool:
        """End a request at any moment and release its blocks, as "abort" or, with an error, as
        "error"; False if no unfinished request has this id."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        if error is None:
            group.abort(self.scheduler)
            return True
        while group.live:
            group.fail(group.live[0], error, self.scheduler)
        return True

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._groups)

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def step(self) -> list[RequestOutput]:
        """Advance by one step; returns the requests that advanced or ended, each alive and up to
        date.

        A runner that runs ahead is kept one step ahead: this step is launched before the tokens of
        the one before are read, and what is returned is the step before.

        A row that fails ends its request, and the others go on. If the runner itself fails, its
        exception passes through, and every unfinished request goes back to waiting with nothing
        computed: the engine can go on, or the requests be aborted.
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
                handle = self.launch(batch)
                self._in_flight.append((handle, self.scheduler.advance()))
            while len(self._in_flight) > int(self.runs_ahead and batch is not None):
                handle, launched = self._in_flight.popleft()
                self._update(launched, self.collect(handle), outputs)
        except BaseException:
            self.start_over()
            raise
        if not self._groups:  # a step run ahead for requests that have ended
            self._in_flight.clear()
        if figures is not None:
            self.trace.emit("STEP", seconds=time.perf_counter() - start, **figures)
        return list(outputs.values())

    def _update(self, launched: list[tuple[Request, int]], results: Sequence,
                outputs: dict[str, RequestOutput]) -> None:
        """Enter what a step gave: full blocks, tokens, failures."""
        if len(results) != len(launched):
            raise ValueError(
                f"the runner returned {len(results)} tokens for {len(launched)} requests")
        finished = Status.FINISHED
        for (request, computed), result in zip(launched, results):
            if request.status is finished:  # ended after this step was launched
                continue
            output = request.output
            if output.request_id not in outputs:
                outputs[output.request_id] = output
                for completion in output.outputs:
                    completion.new_text = ""  # whatever an earlier step added
            if type(result) is int:  # the common case
                self._enter_full_blocks(request, computed)
                self._enter(request, computed, result, None)
                continue
            if not isinstance(result, RowOutput):
                tokens = result if isinstance(result, (list, tuple)) else [result]
                result = RowOutput(list(map(index, tokens)))  # ints, whatever the runner counts in
            if result.error is not None:
                group = request.group
                assert group is not None, f"{request} belongs to no group"
                group.fail(request, result.error, self.scheduler)
                self._forget_if_ended(group)
                continue
            self._enter_full_blocks(request, computed)
            if result.prompt_logprobs and output.prompt_logprobs:
                end = min(computed + 1, request.num_prompt_tokens)
                at = end - len(result.prompt_logprobs)
                output.prompt_logprobs[at:end] = result.prompt_logprobs
            for number, token in enumerate(result.token_ids):
                if number and request.num_computed_tokens > computed:
                    raise ValueError(f"the runner returned {len(result.token_ids)} tokens for a "
                                     f"request whose next step is already running: one is possible")
                if request.status is not finished:
                    self._enter(request, computed + number, token,
                                result.logprobs[number] if result.logprobs else None)

    def _enter_full_blocks(self, request: Request, computed: int) -> None:
        if (computed // self.config.block_size > request.num_registered_blocks
                and request.status is Status.RUNNING):
            self.scheduler.register_computed(request, computed)  # not if preempted since: no blocks

    def _enter(self, request: Request, computed: int, token: int,
               logprobs: dict[int, float] | None) -> None:
        """The token that follows the first `computed` ones, if that is the end of what is known."""
        token_ids = request.token_ids
        if computed == len(token_ids):
            token_ids.append(token)
        elif token_ids[computed] == PENDING:
            token_ids[computed] = token
        else:
            return  # in the middle of its prompt: no token yet
        group = request.group
        assert group is not None, f"{request} belongs to no group"
        group.take(request, token, logprobs, self.scheduler)
        self._forget_if_ended(group)

    def _forget_if_ended(self, group: Group) -> None:
        if not group.live:
            del self._groups[group.output.request_id]

    # ── when something goes wrong ─────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """Drop every request, whatever an interruption left behind; the prefix cache survives if it
        can."""
        self._in_flight.clear()
        self._alone = None
        try:
            for request_id in list(self._groups):
                self.abort(request_id)
            self.check_integrity()
            assert self.block_pool.num_free() == self.config.num_blocks
        except Exception:  # caught in the middle of an update: start afresh
            self._build()

    def start_over(self, alone: str | None = None) -> None:
        """Put every unfinished request back to waiting, in an engine that is otherwise new: after a
        failed step only the tokens that were returned are certain.

        alone: the only request to be scheduled until the next `start_over`; None schedules all.
        """
        groups = list(self._groups.values())
        num_preemptions = self.scheduler.num_preemptions
        self._build()
        self._alone = alone
        self.scheduler.num_preemptions = num_preemptions
        for group in groups:
            self._groups[group.output.request_id] = group
            group.restart(self.scheduler)
            self._forget_if_ended(group)
        self.scheduler.waiting = [
            request for request in self.scheduler.waiting
            if alone in (None, request.output.request_id)
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, tables, queues and counts agree; run between steps."""
        self.scheduler.check_integrity()
        scheduled = set(self.scheduler.waiting + self.scheduler.running)
        expected = 0
        for name, group in self._groups.items():
            assert group.live, "a request without sequences never ends"
            if self._alone in (None, name):
                expected += len(group.scheduled())
                for request in group.scheduled():
                    assert request in scheduled, f"{request} is lost"
        assert len(scheduled) == expected, "a finished request is still scheduled"
