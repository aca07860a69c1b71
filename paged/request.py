"""A request on its way through the engine, and what its user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from paged.rules import Rules
from paged.sampling import SamplingParams

if TYPE_CHECKING:
    from paged.completions import Group

PENDING = -1
"""Stands in Request.token_ids for a token still being computed: the step that reads it has it on
the GPU."""


class Status(str, Enum):
    """Where a request stands. WAITING and SWAPPED hold no blocks of the pool, RUNNING does."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        text: what was generated so far, without the stop string; empty without a tokenizer.
        new_text: the part of it that the last step added.
        token_ids: the generated tokens, the one that ended the request included.
        finish_reason: "stop", "length", "abort", "error", or None while it goes on.
        stop_reason: the token id or the string that ended it, for "stop".
        error: what went wrong, for "error"; the text and tokens before it are good.
        logprobs: one dict {token id: log-probability} a generated token, if asked for.
        cumulative_logprob: of all its tokens, if log-probabilities were asked for, and from beam
            search.
    """

    index: int
    text: str = ""
    new_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestMetrics:
    """Times in seconds on time.perf_counter's clock; None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    num_output_tokens: int = 0  # of all completions
    longest_output: int = 0  # tokens of the longest completion
    num_preemptions: int = 0
    # Share of its blocks that beams saved by sharing, over all steps
    memory_saved: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the first blocks were given."""
        scheduled = self.first_scheduled_time
        return None if scheduled is None else scheduled - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between two tokens of a finished request's longest completion; None below
        two."""
        first, last = self.first_token_time, self.finish_time
        if first is None or last is None or self.longest_output < 2:
            return None
        return (last - first) / (self.longest_output - 1)


@dataclass
class RequestOutput:
    """The state of a request. The engine updates it in place: what step() returns is alive, not a
    copy.

    Attributes:
        prompt: the text of the prompt, a conversation's as its template renders it; None where
            token ids were given.
        prompt_logprobs: one dict {token id: log-probability} a token of the prompt, None for the
            first, which follows nothing; None if not asked for.
        outputs: one CompletionOutput a completion (SamplingParams.n).
        finished: every completion has ended.
        num_cached_tokens: prompt tokens found in the prefix cache when the request was first
            admitted.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0
    prompt: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def snapshot(self) -> RequestOutput:
        """A copy that stays as it is while the request goes on."""
        outputs = [
            replace(c, token_ids=list(c.token_ids),
                    logprobs=None if c.logprobs is None else list(c.logprobs)) for c in self.outputs
        ]
        prompt = None if self.prompt_logprobs is None else list(self.prompt_logprobs)
        return replace(self, outputs=outputs, metrics=replace(self.metrics), prompt_logprobs=prompt)


class Request:
    """One sequence of tokens: what the scheduler schedules. A user's request with n > 1 becomes n
    of them.

    Attributes:
        token_ids: the prompt and what was generated since.
        num_computed_tokens: how many of them have their K and V in the cache.
        block_table: the blocks that hold these, in order.
        num_known_blocks: how many of the table, from its beginning, the runner has been told.
        order: arrival order; a preempted request keeps it.
        seat: its row in what the runner keeps, while it runs; else None.
        newly_seated: the runner has not yet been told who sits there.
        num_seats: resident requests it counts for: n until its completions have forked, then 1.
        waits: its next step needs its last token on the CPU, so it is never run ahead.
        may_share_tail: it has forked, so the block it writes next may be shared.
        rules: what its text may not consist of, or None.
        completion: what it adds to its user's output.
        group: what becomes of its tokens, `completions.Completions` or `beam_search.BeamSearch`;
            None for whoever schedules without an engine.
    """

    __slots__ = ("request_id", "order", "params", "token_ids", "num_prompt_tokens",
                 "num_computed_tokens", "block_table", "num_known_blocks", "host_block_table",
                 "status", "seat", "newly_seated", "num_seats", "waits", "may_share_tail", "seed",
                 "salt", "prefix", "num_registered_blocks", "max_num_tokens", "output",
                 "completion", "group", "rules")

    def __init__(self, request_id: str, order: tuple[int, int], token_ids: list[int],
                 params: SamplingParams, output: RequestOutput, completion: CompletionOutput,
                 seed: int, salt: str | None = None, rules: Rules | None = None):
        self.request_id, self.order, self.params = request_id, order, params
        self.token_ids = token_ids
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_computed_tokens = self.num_known_blocks = self.num_registered_blocks = 0
        self.block_table: list[int] = []
        self.host_block_table: list[int] = []
        self.status = Status.WAITING
        self.seat: int | None = None
        self.num_seats = params.n
        self.newly_seated = self.waits = self.may_share_tail = False
        self.seed, self.salt, self.rules = seed, salt, rules
        self.prefix: Any = None  # how far it is registered, in the prefix cache's own terms
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens
        self.output, self.completion = output, completion
        self.group: Group | None = None

    def decodes(self, num_tokens: int) -> bool:
        """Whether so many next tokens are one of its answer, not of its prompt."""
        return num_tokens == 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        found = self.output.prompt_logprobs
        return found is not None and len(found) < self.num_prompt_tokens

    def drop_blocks(self) -> None:
        """Nothing is computed any more. Whoever counts references gives them up before."""
        self.block_table, self.host_block_table = [], []
        self.num_computed_tokens = self.num_known_blocks = self.num_registered_blocks = 0
        self.prefix, self.may_share_tail = None, False

    def start_over(self) -> None:
        """Nothing is computed, and a token still on its way will not arrive."""
        self.drop_blocks()
        self.seat = None
        self.token_ids[self.num_prompt_tokens:] = self.completion.token_ids

    def __repr__(self) -> str:
        return (f"<Request {self.request_id} {self.status.value}: {self.num_computed_tokens} of "
                f"{len(self.token_ids)} tokens computed, blocks {self.block_table}>")
