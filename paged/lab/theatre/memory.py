"""What the K/V memory holds: who wrote each slot, under which prefix, and what K looks like.

`Rows` is the idea of `paged.lab.oracle` around any runner. It does not stop at a wrong read, but
lists it: so a picture can show the read and what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paged.batch import Batch

BARS = 12


@dataclass(frozen=True)
class Row:
    """What one slot holds: the token, who wrote it at which position, and its whole prefix as a
    chain of hashes."""

    token: int
    request: str
    position: int
    chain: int


@dataclass
class Moves:
    """What a batch does to the memory, and which of its requests get a token by it.

    Attributes:
        calls: {event: who called it}, frames that the recorder notes while the batch runs.
    """

    request_ids: list[str]
    slots: list[int]
    positions: list[int]
    starts: list[int]
    lengths: list[int]
    samples: list[bool]
    tables: list[list[int]]
    copies: list[tuple[int, int]]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    calls: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch) -> Moves:
        """The moves of a batch."""
        return cls(batch.request_ids, batch.slot_mapping, batch.positions, batch.query_start_loc,
                   batch.seq_lens, batch.samples, batch.block_tables, batch.block_copies,
                   batch.swap_out, batch.swap_in)


class Rows:
    """The rows of the pool and of host memory.

    Attributes:
        rows, host: a Row or None, one a slot.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0):
        self.block_size = block_size
        self.rows: list[Row | None] = [None] * (num_blocks * block_size)
        self.host: list[Row | None] = [None] * (num_host_blocks * block_size)

    def move(self, moves: Moves) -> None:
        """Swap out, copy, swap in."""
        self._copy(self.rows, self.host, moves.swap_out)
        self._copy(self.rows, self.rows, moves.copies)
        self._copy(self.host, self.rows, moves.swap_in)

    def write(self, moves: Moves, tokens: Mapping[str, tuple[str | None, Sequence[int]]]) -> None:
        """Enter the new tokens where the slot mapping says. tokens: (salt, token ids) a request."""
        for i, request in enumerate(moves.request_ids):
            first, end = moves.starts[i], moves.starts[i + 1]
            chains = chain(*tokens[request])
            for slot, position in zip(moves.slots[first:end], moves.positions[first:end]):
                self.rows[slot] = Row(tokens[request][1][position], request, position,
                                      chains[position])

    def wrong_reads(self, moves: Moves, tokens: Mapping[str, tuple[str | None,
                                                                   Sequence[int]]]) -> list[list]:
        """[request, position, slot or None, why] of every row that attention reads and that was not
        written under the request's own prefix."""
        wrong = []
        for request, table, length in zip(moves.request_ids, moves.tables, moves.lengths):
            chains = chain(*tokens[request])
            for position in range(length):
                index = position // self.block_size
                if index >= len(table) or position >= len(chains):
                    wrong.append([request, position, None, "its table has no block for it"])
                    continue
                slot = table[index] * self.block_size + position % self.block_size
                row = self.rows[slot]
                if row is None:
                    wrong.append([request, position, slot, "nobody has written it"])
                elif row.chain != chains[position]:
                    wrong.append([
                        request, position, slot,
                        f"{row.request} wrote it, as position {row.position} of another text"
                        if row.request != request else
                        f"it was written as position {row.position}, after other tokens"
                    ])
        return wrong

    def _copy(self, source: list, destination: list, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        contents = [source[block * size:(block + 1) * size] for block, _ in pairs]
        for (_, block), rows in zip(pairs, contents):
            destination[block * size:(block + 1) * size] = rows


def chain(salt: str | None, token_ids: Sequence[int]) -> list[int]:
    """A number for each prefix of the tokens; equal numbers, equal prefixes and salts."""
    chains, last = [], hash(("salt", salt))
    for token in token_ids:
        last = hash((last, token))
        chains.append(last)
    return chains


class Fingerprints:
    """A dozen digits for the K of a slot in one layer, read from the real cache.

    K's channels differ far more among themselves than between tokens. So a digit is a channel's
    distance from its mean, in standard deviations, as the first step measured them; the channels
    taken are those that differ most between its tokens. The same K gives the same digits.

    Args:
        kv: has `layer(index) -> (K, V)`, as PagedKVCache.
        layer: which one; the middle one knows a token's neighbours already.
    """

    def __init__(self, kv, layer: int | None = None):
        self.kv = kv
        self.layer = len(kv.k) // 2 if layer is None else layer
        self._mean: Tensor | None = None

    def read(self, slots: Sequence[int]) -> dict[int, str]:
        """{slot: digits} as the cache is now."""
        if not slots:
            return {}
        rows = self.kv.layer(self.layer)[0].flatten(0, 1)[list(slots)].flatten(1).float().cpu()
        if self._mean is None:
            self._mean, deviation = rows.mean(0), rows.std(0, correction=0)
            spread = deviation / (self._mean.abs() + deviation + 1e-6)
            self._channels = spread.topk(min(BARS, len(spread))).indices.sort().values
            self._deviation = deviation.clamp_min(1e-3)
        z = ((rows - self._mean) / self._deviation)[:, self._channels]
        digits = (4.5 + 2 * z).nan_to_num(0).round().clamp(0, 9).int().tolist()
        return {slot: "".join(map(str, row)) for slot, row in zip(slots, digits)}
