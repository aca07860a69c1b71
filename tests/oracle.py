"""A runner without a model that cannot be fooled.

Each cache row remembers the exact prefix that wrote it, and the next token is a function of the whole prefix.
Every row that attention would read is checked against the request's own tokens, so a stale block, a missed copy
or a chunk that sees too much is caught where it happens, even when the output would have come out the same.
"""

from __future__ import annotations

import hashlib


def next_token(tokens, vocab_size: int = 4) -> int:
    """The fake model: a token that depends on every token before it. Few tokens, so that prefixes collide often."""
    digest = hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def truth(prompt, num_tokens: int) -> list[int]:
    """What a request must generate, whatever shares the engine with it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt):]


class OracleRunner:
    """Executes batches on rows that hold prefixes instead of keys and values."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0):
        self.block_size = block_size
        self.rows: list[tuple | None] = [None] * (num_blocks * block_size)
        self.host_rows: list[tuple | None] = [None] * (num_host_blocks * block_size)
        self.num_computed_tokens = 0
        self.batches = []

    def execute(self, batch) -> list[int]:
        self._copy_blocks(self.rows, self.host_rows, batch.swap_out)
        self._copy_blocks(self.rows, self.rows, batch.block_copies)
        self._copy_blocks(self.host_rows, self.rows, batch.swap_in)
        self.num_computed_tokens += len(batch.input_ids)
        self.batches.append((list(batch.request_ids), list(batch.query_start_loc), list(batch.seq_lens)))

        # Write: a row remembers every token up to its own. The tokens before this step's come from the rows.
        written: set[int] = set()
        contexts = []
        for i, seq_len in enumerate(batch.seq_lens):
            first, last = batch.query_start_loc[i], batch.query_start_loc[i + 1]
            table, new = batch.block_tables[i], batch.input_ids[first:last]
            start = seq_len - len(new)
            assert len(new) >= 1, f"request {batch.request_ids[i]} is scheduled for nothing"
            assert batch.positions[first:last] == list(range(start, seq_len)), "positions do not fit the context"
            before = self.rows[self._slot(table, start - 1)] if start else ()
            assert before is not None and len(before) == start, (
                f"request {batch.request_ids[i]} goes on from position {start}, its last row holds {before}")
            contexts.append(tuple(before) + tuple(new))
            for position, slot in zip(range(start, seq_len), batch.slot_mapping[first:last]):
                assert slot == self._slot(table, position), f"slot {slot} is not where position {position} is read"
                assert slot not in written, f"two tokens of one step are written to slot {slot}"
                written.add(slot)
                self.rows[slot] = contexts[-1][:position + 1]

        # Read: every row of the context must have been written under this very prefix.
        for i, seq_len in enumerate(batch.seq_lens):
            for position in range(seq_len):
                row = self.rows[self._slot(batch.block_tables[i], position)]
                assert row == contexts[i][:position + 1], (
                    f"request {batch.request_ids[i]} reads position {position} of {contexts[i]}, "
                    f"written under {row}")
        return [next_token(context) for context in contexts]

    def _slot(self, table, position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _copy_blocks(self, source_rows, destination_rows, pairs) -> None:
        size = self.block_size
        contents = [source_rows[s * size:(s + 1) * size] for s, _ in pairs]
        for (_, d), rows in zip(pairs, contents):
            destination_rows[d * size:(d + 1) * size] = rows


class RunAheadOracle(OracleRunner):
    """The same, with the tokens of a step read only after the next one was launched."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last_token: dict[str, int] = {}

    def launch(self, batch):
        ids = [self.last_token[batch.request_ids[self._request_of(batch, i)]] if token == -1 else token
               for i, token in enumerate(batch.input_ids)]
        batch.input_ids[:] = ids
        tokens = self.execute(batch)
        self.last_token.update(zip(batch.request_ids, tokens))
        return tokens

    def collect(self, handle):
        return handle

    @staticmethod
    def _request_of(batch, row: int) -> int:
        return next(i for i, end in enumerate(batch.query_start_loc[1:]) if row < end)
