"""One step as data: what the scheduler asks of a runner, and what a runner gives back.

A Batch holds lists and numbers only. It can be pickled, sent to another process and run there. It
says the same work twice, for two kinds of runners:

    the specification    positions, slot_mapping, block_tables: all about every token, so that a
                         runner needs no memory of earlier steps
    the fast path        seats, table_writes, newcomers: what changed, for a runner that keeps block
                         tables and random seeds where it computes, in a row a request, its seat

A runner says `needs_lists = False` if it reads the second kind only; then the first is not built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from paged.request import Request
from paged.rules import COUNT, FROM, IN_PROMPT, MARKED, Rules
from paged.sampling import WORD_TOKENS
from paged.slots import slot_mapping_for
from paged.trace import Trace


@dataclass
class Newcomer:
    """A request that has just taken its seat: how its tokens are to be drawn.

    Attributes:
        row: of the batch.
        numbers: by the columns of `sampling`, TEMPERATURE to HAS_HISTORY.
        integers: likewise, SEED, TOP_K, PROMPT, the prompt's length, and WORD_TOKENS.
        history: {token: times it stands in the output, plus IN_PROMPT if it is in the prompt},
            where a penalty asks for it; or MARKED plus the number of the token's mark.
        rest: the history of all other tokens.
        marks, words: see `rules`; lists of (bias, first place, times in the output), and of
            (token, ends in, drawn).
    """

    row: int
    numbers: list[float]
    integers: list[int]
    history: dict[int, int] = field(default_factory=dict)
    rest: int = 0
    marks: list[list] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)


def newcomer(row: int, request: Request) -> Newcomer:
    """A request as its runner is to know it."""
    params, rules = request.params, request.rules
    numbers = [
        params.temperature, params.top_p, params.min_p, params.repetition_penalty,
        params.presence_penalty, params.frequency_penalty,
        float(params.penalizes or rules is not None)
    ]
    integers = [request.seed, min(params.top_k, 2**31 - 1), request.num_prompt_tokens, 0]
    new = Newcomer(row, numbers, integers)
    output = request.token_ids[request.num_prompt_tokens:]
    if params.penalizes:
        new.history = dict(Counter(output))
        for token in set(request.token_ids[:request.num_prompt_tokens]):
            new.history[token] = min(new.history.get(token, 0), IN_PROMPT - 1) + IN_PROMPT
    if rules is not None:
        _enter_rules(new, rules, output)
    return new


def _enter_rules(new: Newcomer, rules: Rules, output: list[int]) -> None:
    new.marks = [[bias, first, 0] for bias, first in rules.marks]
    new.words, ending = rules.columns(output)
    new.integers[WORD_TOKENS] = len(new.words)
    for number in ending:  # the others of its word are the last ones of the output
        new.marks[number][FROM] = max(new.marks[number][FROM], len(output) + 1)
    if rules.allowed is not None:
        new.rest = MARKED
        new.history = {token: new.history.get(token, 0) for token in rules.allowed}
    for token, number in rules.numbers.items():
        seen = new.history.get(token, 0)
        new.marks[number][COUNT] = seen % IN_PROMPT
        new.history[token] = MARKED + number + (seen & IN_PROMPT)


@dataclass
class Batch:
    """The tokens of all requests one after the other; request i has those from query_start_loc[i]
    to [i + 1].

    A runner does swap_out, then block_copies, then swap_in, each a list of pairs that are all read
    before any is written; then it writes the new K and V and attends.

    Attributes:
        input_ids: of the tokens; PENDING is the token last drawn for the request's seat.
        seq_lens: context of each request after this step.
        samples: whether all of a request's tokens are computed with this step, so that its token
            counts; whatever a runner gives for the others is ignored.
        seats: of each request, given at admission and kept while it holds blocks.
        table_writes: what the tables gained: (row, first logical block, blocks).
        num_logprobs: how many likeliest tokens the requests want to hear of that want any, by row.
        prompt_logprobs: the same of the prompt: by row how many, and the prompt's token behind each
            of this step.
        block_copies, swap_out, swap_in: (source, destination), (block, host block), (host block,
            block).
        positions, slot_mapping, block_tables: the specification; empty for a runner that reads
            none of it.
    """

    request_ids: list[str] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    table_writes: list[tuple[int, int, list[int]]] = field(default_factory=list)
    newcomers: list[Newcomer] = field(default_factory=list)
    num_logprobs: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)


@dataclass
class RowOutput:
    """What a step gives for a request, where that is not just a token.

    Attributes:
        token_ids: the tokens that follow, in order: one, or several from a runner that does not run
            ahead. K and V of none of them are in the cache yet.
        logprobs: of each of them {token id: log-probability}, where asked for.
        error: why there is no token; the request ends with it, and the others go on.
        prompt_logprobs: of the tokens of `Batch.prompt_logprobs`, where asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, float]] | None = None


def build_batch(scheduled: Mapping[Request, int], block_size: int, lists: bool = True) -> Batch:
    """The batch in which each request computes so many of its next tokens.

    From here on the runner knows the tables as they are now. lists: build the specification too.
    """
    batch = Batch(query_start_loc=[0, *accumulate(scheduled.values())])
    for row, (request, num_tokens) in enumerate(scheduled.items()):
        token_ids, table = request.token_ids, request.block_table
        computed = request.num_computed_tokens
        end = computed + num_tokens
        batch.request_ids.append(request.request_id)
        if num_tokens == 1:  # the common case
            batch.input_ids.append(token_ids[computed])
        else:
            batch.input_ids += token_ids[computed:end]
        batch.seq_lens.append(end)
        batch.samples.append(end == len(token_ids))
        assert request.seat is not None, f"{request} has no seat"
        batch.seats.append(request.seat)
        if request.num_known_blocks < len(table):
            known = request.num_known_blocks
            batch.table_writes.append((row, known, table[known:]))
            request.num_known_blocks = len(table)
        if request.newly_seated:
            batch.newcomers.append(newcomer(row, request))
            request.newly_seated = False
        if request.params.logprobs is not None and batch.samples[row]:
            batch.num_logprobs[row] = request.params.logprobs
        if request.wants_prompt_logprobs:
            behind = token_ids[computed + 1:min(end + 1, request.num_prompt_tokens)]
            if behind:
                batch.prompt_logprobs[row] = request.params.prompt_logprobs or 0, behind
        if lists:
            positions = range(computed, end)
            batch.positions += positions
            batch.slot_mapping += slot_mapping_for(table, positions, block_size)
            batch.block_tables.append(list(table))
    return batch


def trace_batch(batch: Batch, scheduled: Mapping[Request, int], block_size: int, trace: Trace,
                free: int, waiting: int) -> None:
    """Report what is scheduled, and the arrays that describe it, for prompts and for decodes
    apart."""
    requests = list(scheduled)
    for phase in ("PREFILL", "DECODE"):
        rows = [
            i for i, request in enumerate(requests)
            if request.decodes(scheduled[request]) == (phase == "DECODE")
        ]
        if not rows:
            continue
        tokens = [scheduled[requests[i]] for i in rows]
        trace.emit(f"SCHEDULE_{phase}", requests=[batch.request_ids[i] for i in rows],
                   tokens=tokens, free=free, waiting=waiting)
        lengths = [batch.seq_lens[i] for i in rows]
        slots = [
            slot for i, new, length in zip(rows, tokens, lengths)
            for slot in slot_mapping_for(requests[i].block_table, range(length
                                                                        - new, length), block_size)
        ]
        trace.emit(f"PREPARE_{phase}", seq_lens=lengths, num_slots=len(slots), first_slot=slots[0],
                   last_slot=slots[-1], cu_seqlens_q=[0, *accumulate(tokens)],
                   cu_seqlens_k=[0, *accumulate(lengths)])
