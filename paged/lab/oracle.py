"""A runner without a model that cannot be fooled.

Each row of its cache holds the exact prefix that wrote it, in place of K and V, and the next token
is a function of the whole prefix. Every row that attention would read is compared with the
request's own tokens. So a stale block, a copy that was not made or a chunk that sees too much is
caught at the read, even where the generated tokens would have come out the same.

    block size 4, a request [7, 3, 9, ...]      rows of its block: (7,)   (7, 3)   (7, 3, 9)   None

Beside the prefix a row remembers its salt, since tenants may not share even where their prefixes
agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from paged.batch import RowOutput
from paged.request import PENDING, Request

VOCAB_SIZE = 4  # few tokens, so that prefixes of unrelated requests collide often


def next_token(tokens: Sequence[int], index: int = 0) -> int:
    """The token that completion `index` continues with: a function of every token before it."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=4, salt=bytes([index])).digest()
    return digest[0] % VOCAB_SIZE


def distribution(tokens: Sequence[int]) -> dict[int, float]:
    """Log-probability of every token of the vocabulary after this prefix; no two are alike."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=4 * VOCAB_SIZE).digest()
    weights = [
        1 + int.from_bytes(digest[4 * token:4 * token + 4], "little") for token in range(VOCAB_SIZE)
    ]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def truth(prompt: Sequence[int], max_tokens: int, index: int = 0,
          stop_token_ids: Iterable[int] = ()) -> list[int]:
    """What completion `index` of a prompt must be, whatever shares the engine with it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, index))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt):]


class OracleRunner:
    """Executes batches over rows that hold prefixes. Raises AssertionError at the first wrong read
    or write.

    Tokens are 0 to 255.

    Attributes:
        rows: the salt and the prefix that wrote each slot, None where nothing was written.
        tables: of each seat, as the batches have told it.
        num_computed_tokens: tokens executed so far, those of recomputed prompts included.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0):
        self.block_size = block_size
        self.rows: list[tuple | None] = [None] * (num_blocks * block_size)
        self.host_rows: list[tuple | None] = [None] * (num_host_blocks * block_size)
        self.num_computed_tokens = 0
        self._last_token: dict[Request, int] = {}
        self.tables: dict[int, list[int]] = {}

    def watch(self, engine) -> None:
        """The engine whose requests say what they consist of; `Engine` calls this itself."""
        self.engine = engine

    def execute(self, batch) -> list:
        """Copy, write, read and check; returns the next token of each request."""
        self.requests = list(self.engine.scheduler.scheduled)
        assert self.requests or batch.swap_out or batch.swap_in, "an empty batch makes no progress"
        assert [request.request_id for request in self.requests] == batch.request_ids
        self._copy_blocks(self.rows, self.host_rows, batch.swap_out)
        self._copy_blocks(self.rows, self.rows, batch.block_copies)
        self._copy_blocks(self.host_rows, self.rows, batch.swap_in)
        contexts = [self._context(batch, row) for row in range(len(self.requests))]
        self._write(batch, contexts)
        self._read(batch, contexts)
        self.num_computed_tokens += len(batch.input_ids)
        self._check_changes(batch)
        tokens = [
            next_token(context, request.completion.index)
            for request, context in zip(self.requests, contexts)
        ]
        self._last_token.update(zip(self.requests, tokens))
        return [
            RowOutput([token], [distribution(context)]) if row in batch.num_logprobs else token
            for row, (token, context) in enumerate(zip(tokens, contexts))
        ]

    def _check_changes(self, batch) -> None:
        """Tables kept up to date by what the batch says has changed must be the batch's tables."""
        assert len(set(batch.seats)) == len(batch.seats), "two requests sit in one seat"
        for newcomer in batch.newcomers:
            self.tables[batch.seats[newcomer.row]] = []
        for row, first, blocks in batch.table_writes:
            table = self.tables[batch.seats[row]]
            assert first <= len(table), f"blocks {len(table)} to {first} of a table were never told"
            table[first:first + len(blocks)] = blocks
        for row, request in enumerate(self.requests):
            assert self.tables[batch.seats[row]] == batch.block_tables[row], (
                f"{request} is known by the table {self.tables[batch.seats[row]]}")
            assert batch.samples[row] == (batch.seq_lens[row] == len(request.token_ids))

    def _context(self, batch, row: int) -> tuple[int, ...]:
        """The tokens that a request knows itself to consist of, up to the last one of this step."""
        request = self.requests[row]
        tokens = batch.input_ids[batch.query_start_loc[row]:batch.query_start_loc[row + 1]]
        start, end = request.num_computed_tokens, request.num_computed_tokens + len(tokens)
        assert start < end <= len(
            request.token_ids), f"{request} is scheduled for {len(tokens)} tokens"
        context = request.token_ids[:end]
        assert tokens == context[
            start:], f"{request} computes tokens {tokens}, its own are {context[start:]}"
        if context[-1] == PENDING:
            context[-1] = self._last_token[request]
        return tuple(context)

    def _write(self, batch, contexts: list[tuple[int, ...]]) -> None:
        """Store the prefixes of the new tokens, where the slot mapping says and the block table
        will look."""
        written = set()
        for row, (request, context) in enumerate(zip(self.requests, contexts)):
            first, last = batch.query_start_loc[row], batch.query_start_loc[row + 1]
            assert batch.seq_lens[row] == len(context), (
                f"{request} attends to {batch.seq_lens[row]} positions, its context has "
                f"{len(context)}")
            for index, position in zip(range(first, last),
                                       range(len(context) + first - last, len(context))):
                slot = self._slot(batch.block_tables[row], position)
                assert batch.positions[index] == position, (
                    f"{request} computes position {position} as {batch.positions[index]}")
                assert batch.slot_mapping[index] == slot, (
                    f"{request} writes position {position} to slot {batch.slot_mapping[index]}, "
                    f"and will read slot {slot}")
                assert slot not in written, (
                    f"two requests write slot {slot} in one step; one is {request}")
                written.add(slot)
                self.rows[slot] = request.salt, context[:position + 1]

    def _read(self, batch, contexts: list[tuple[int, ...]]) -> None:
        """Every row of every context must have been written under that very prefix."""
        for request, table, context in zip(self.requests, batch.block_tables, contexts):
            for position in range(len(context)):
                row = self.rows[self._slot(table, position)]
                assert row == (request.salt, context[:position + 1]), (
                    f"{request} reads position {position} of {list(context)}: "
                    + _written_under(row))

    def check_names(self) -> None:
        """Raise AssertionError unless every block that the prefix cache would give away holds what
        it is found under; run between steps."""
        cache, size = self.engine.prefix_cache, self.block_size
        for block, (salt, tokens) in (cache.contents() if cache else {}).items():
            for offset in range(size):
                row = self.rows[block * size + offset]
                assert row == (salt, tokens[:len(tokens) - size + offset + 1]), (
                    f"block {block} is found as {list(tokens)}, and in its row {offset} "
                    + _written_under(row))

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _copy_blocks(self, source_rows: list, destination_rows: list, pairs) -> None:
        size = self.block_size
        contents = [source_rows[source * size:(source + 1) * size] for source, _ in pairs]
        for (_, destination), rows in zip(pairs, contents):
            destination_rows[destination * size:(destination + 1) * size] = rows


def _written_under(row: tuple | None) -> str:
    if row is None:
        return "nothing was written there"
    salt, prefix = row
    return f"it was written under {list(prefix)}" + (f" and salt {salt!r}" if salt else "")


class RunAheadOracle(OracleRunner):
    """The same, one step ahead of the engine, which does not yet know the tokens that a step begins
    with."""

    runs_ahead = True

    def launch(self, batch) -> list:
        """Execute; the engine sees the result when it collects it."""
        return self.execute(batch)

    def collect(self, tokens: list) -> list:
        """The tokens of a launched step."""
        return tokens
