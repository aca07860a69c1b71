"""One step's work, as plain lists: the seam between the scheduler and whatever runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from paged.request import Request
from paged.trace import Trace


@dataclass
class Batch:
    """The tokens of all requests one after the other; request i has those from query_start_loc[i]
    to [i + 1].

    A runner does swap_out, then block_copies, then swap_in, each a list of pairs that are all read
    before any is written; then it writes the new K and V and attends. block_tables are the lists of
    the requests
    themselves: read them, and only until the next step.
    """

    request_ids: list[str] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)  # context after this step
    block_tables: list[list[int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    requests: list[Request] = field(
        default_factory=list)  # for a sampler: their params, seeds, tokens
    logprobs: list[dict[int, float] | None] | None = None  # filled in by a runner that samples

    def is_decode(self, row: int) -> bool:
        """Whether request `row` computes a single token after its prompt."""
        return (self.query_start_loc[row + 1] - self.query_start_loc[row] == 1
                and self.seq_lens[row] > self.requests[row].num_prompt_tokens)


def build_batch(scheduled: Mapping[Request, int], block_size: int) -> Batch:
    """The batch in which each request computes so many of its next tokens."""
    requests = list(scheduled)
    input_ids, positions, slot_mapping, seq_lens = [], [], [], []
    for request, num_tokens in scheduled.items():
        computed, table = request.num_computed_tokens, request.block_table
        if num_tokens == 1:  # the common case, without a loop
            input_ids.append(request.token_ids[computed])
            positions.append(computed)
            slot_mapping.append(table[computed // block_size] * block_size + computed % block_size)
        else:
            new = range(computed, computed + num_tokens)
            input_ids += request.token_ids[computed:computed + num_tokens]
            positions += new
            slot_mapping += [table[p // block_size] * block_size + p % block_size for p in new]
        seq_lens.append(computed + num_tokens)
    return Batch([request.request_id for request in requests], input_ids, positions, slot_mapping,
                 [0, *accumulate(scheduled.values())], seq_lens,
                 [request.block_table for request in requests], requests=requests)


def trace_batch(batch: Batch, trace: Trace, free: int, waiting: int) -> None:
    """Report what is scheduled, and the arrays that describe it, for prompts and for decodes
    apart."""
    starts = batch.query_start_loc
    for phase in ("PREFILL", "DECODE"):
        rows = [i for i in range(len(batch.requests)) if batch.is_decode(i) == (phase == "DECODE")]
        if not rows:
            continue
        tokens = [starts[i + 1] - starts[i] for i in rows]
        trace.emit(f"SCHEDULE_{phase}", requests=[batch.request_ids[i] for i in rows],
                   tokens=tokens, free=free, waiting=waiting)
        slots = [slot for i in rows for slot in batch.slot_mapping[starts[i]:starts[i + 1]]]
        lengths = [batch.seq_lens[i] for i in rows]
        trace.emit(f"PREPARE_{phase}", seq_lens=lengths, num_slots=len(slots), first_slot=slots[0],
                   last_slot=slots[-1], cu_seqlens_q=[0, *accumulate(tokens)],
                   cu_seqlens_k=[0, *accumulate(lengths)])
