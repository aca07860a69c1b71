"""What a runner keeps of each request where it computes: a row of a few tensors, its seat.

A batch says what changed (`batch.Batch`), so that a step sends a few numbers a request and not its
whole block table: who is new and how it samples, what each table gained. The tokens drawn stay here
as well; a step that is launched before they are read takes its input from here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged.batch import Batch
from paged.rules import BIAS, FROM, MOST_MARKS, MOST_WORD_TOKENS
from paged.sampling import HAS_HISTORY, WORD_TOKENS


class Seats:
    """The state of all seats, and of one more in which the padding of a step sits.

    Args:
        num_seats: requests that run at once.
        table_width: blocks of a request.
        vocab_size, device: as they are.

    Attributes:
        tables: [seats + 1, table_width], int32.
        tokens: [seats + 1], int32; the token last drawn.
        floats, integers: [seats + 1, columns], float32 and int64; the columns of `sampling`.
        history: [seats + 1, vocab_size], int16; kept for seats with a penalty or rules only.
        marks, words: [seats + 1, 3, columns], int32; kept for seats with rules only, see `rules`.
    """

    def __init__(self, num_seats: int, table_width: int, vocab_size: int, device: torch.device):
        self.device = device
        self.tables = self._zeros(num_seats + 1, table_width, dtype=torch.int32)
        self.tokens = self._zeros(num_seats + 1, dtype=torch.int32)
        self.floats = self._zeros(num_seats + 1, HAS_HISTORY + 1, dtype=torch.float32)
        self.integers = self._zeros(num_seats + 1, WORD_TOKENS + 1, dtype=torch.int64)
        self.marks = self._zeros(num_seats + 1, 3, MOST_MARKS, dtype=torch.int32)
        self.words = self._zeros(num_seats + 1, 3, MOST_WORD_TOKENS, dtype=torch.int32)
        self.history = self._zeros(num_seats + 1, vocab_size, dtype=torch.int16)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def update(self, batch: Batch) -> list[int]:
        """Bring the seats up to date with a batch.

        A row's one new block, where the row has one token, is returned, to travel with the step's
        inputs, −1 for the others; whatever else is new is written here.
        """
        if batch.newcomers:
            self._seat(batch)
        new_blocks = [-1] * len(batch.seats)
        starts = batch.query_start_loc
        places: list[int] = []
        blocks: list[int] = []
        for row, first, gained in batch.table_writes:
            if len(gained) == 1 and starts[row + 1] - starts[row] == 1:
                new_blocks[row] = gained[0]
            else:
                start = batch.seats[row] * self.tables.shape[1] + first
                places += range(start, start + len(gained))
                blocks += gained
        if places:
            self.tables.view(-1).index_copy_(0, self.send(places, torch.int64),
                                             self.send(blocks, torch.int32))
        return new_blocks

    def _seat(self, batch: Batch) -> None:
        at = self.send([batch.seats[new.row] for new in batch.newcomers], torch.int64)
        # Temperatures end where float32 does; seeds are any integers, of which 64 bits count.
        numbers = [[min(number, 1e30) for number in new.numbers] for new in batch.newcomers]
        integers = [[(n + 2**63) % 2**64 - 2**63 for n in new.integers] for new in batch.newcomers]
        self.floats.index_copy_(0, at, self.send(numbers, torch.float32))
        self.integers.index_copy_(0, at, self.send(integers, torch.int64))
        for new in batch.newcomers:
            if new.numbers[HAS_HISTORY]:
                seat = batch.seats[new.row]
                row = self.history[seat].fill_(new.rest)
                row.index_copy_(0, self.send(list(new.history), torch.int64),
                                self.send(list(new.history.values()), torch.int16))
                if new.marks:
                    kept = self.marks[seat, :, :len(new.marks)]
                    bias = self.send([mark[BIAS] for mark in new.marks], torch.float32)
                    kept[BIAS] = bias.view(torch.int32)
                    kept[FROM:] = self.send([mark[FROM:] for mark in new.marks], torch.int32).T
                if new.words:
                    self.words[seat, :, :len(new.words)] = self.send(new.words, torch.int32).T

    def send(self, values: list, dtype: torch.dtype) -> Tensor:
        """Numbers on the device; from pinned memory the copy does not wait for the step that a GPU
        is at."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)


class Prepared(NamedTuple):
    """What the layers of a step start from.

    Attributes:
        x: embeddings [tokens, hidden].
        squares: the sums of their squares [tokens, 1], where the fused operations want them.
        positions, slots: [tokens], −1 for padding.
        tables: [requests, width] block tables; what lies behind a context is anything.
    """

    x: Tensor
    squares: Tensor | None
    positions: Tensor
    slots: Tensor
    tables: Tensor


def prepare(ids: Tensor, seats: Tensor, new_blocks: Tensor, seq_lens: Tensor,
            query_start_loc: Tensor, state: Seats, embedding: Tensor, block_size: int,
            first_token: int | None = None) -> Prepared:
    """What the layers of a step start from: tokens, positions, slots and tables, from the seats.

    Args:
        ids: [tokens]; PENDING is the token last drawn for the seat.
        seats, new_blocks, seq_lens: [requests]; a new block (else −1) is entered into the seat's
            table as the last of the context.
        query_start_loc: [requests + 1].
        state, embedding, block_size: as they are.
        first_token: of an embedding that holds a part of the vocabulary; the other tokens get
            zeros.

    The specification of `kernels.prepare`, which also knows padding.
    """
    new = new_blocks >= 0
    last_block = (seq_lens - 1) // block_size
    state.tables[seats[new], last_block[new]] = new_blocks[new]
    tables = state.tables[seats]
    row = torch.arange(len(seats), device=ids.device).repeat_interleave(query_start_loc.diff())
    behind = query_start_loc[1:][row] - torch.arange(len(ids), device=ids.device)
    positions = seq_lens[row] - behind
    blocks = tables[row, positions // block_size]
    slots = blocks.long() * block_size + positions % block_size
    ids = torch.where(ids < 0, state.tokens[seats[row]], ids)
    if first_token is None:
        x = torch.nn.functional.embedding(ids, embedding)
    else:
        here = (ids >= first_token) & (ids < first_token + len(embedding))
        x = torch.nn.functional.embedding(torch.where(here, ids - first_token, 0), embedding)
        x = torch.where(here[:, None], x, 0)
    return Prepared(x, None, positions, slots, tables)
