"""Which part of a model a rank holds.

A layer is cut so that its ranks meet twice, where half a layer ends in a sum:

    qkv       rows of whole heads           every rank: its heads, their K and V, their attention
    output    the columns of these heads    ► a sum over ranks, + residual
    gate_up   rows                          every rank: its part of the hidden layer
    down      the columns of these rows     ► a sum over ranks, + residual

    embedding, head    rows: each rank knows its part of the vocabulary
    norms              whole, everywhere
    biases             with their rows; that of a sum is rank 0's, so that it is added once
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged.models.config import ModelConfig


def heads_of_rank(num_heads: int, num_kv_heads: int, world_size: int,
                  rank: int) -> tuple[range, range]:
    """The query heads of a rank, and the KV heads that these use.

    Where there are fewer KV heads than ranks, neighbours keep the same one. Raises ValueError for
    heads that cannot be dealt out evenly, and for a rank that does not exist.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}: of {world_size} ranks the last is {world_size - 1}")
    if num_heads % world_size:
        raise ValueError(f"{num_heads} query heads cannot be dealt out evenly to {world_size} "
                         f"ranks: choose a tensor_parallel_size that divides them")
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} KV heads and {world_size} ranks do not divide each other: "
            f"choose a tensor_parallel_size that divides them or is a multiple")
    each, group = num_heads // world_size, num_heads // num_kv_heads
    first, end = rank * each, (rank + 1) * each
    return range(first, end), range(first // group, (end - 1) // group + 1)


@dataclass(frozen=True)
class Part:
    """What one of `size` ranks holds of a model.

    Args:
        whole: the shape of the model.
        rank, size: which rank, of how many.

    Raises ValueError, with the numbers, for a model that cannot be cut so.
    """

    whole: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        heads_of_rank(self.whole.num_heads, self.whole.num_kv_heads, self.size, self.rank)
        if self.whole.intermediate_size % self.size:
            raise ValueError(f"An MLP of {self.whole.intermediate_size} cannot be dealt out evenly "
                             f"to {self.size} ranks: choose a tensor_parallel_size that divides it")

    @property
    def config(self) -> ModelConfig:
        """The part as a model of its own: what a rank allocates."""
        heads, kv_heads = self._heads()
        return replace(self.whole, num_heads=len(heads), num_kv_heads=len(kv_heads),
                       intermediate_size=self.whole.intermediate_size // self.size,
                       vocab_size=self._vocab_rows())

    @property
    def first_token(self) -> int:
        """The first token id of this part's vocabulary."""
        return self.rank * self._vocab_rows()

    def cut(self, name: str) -> tuple[slice, ...]:
        """What to read of a checkpoint's tensor; () is all of it.

        It may be shorter than the place that the part has for it: the last rows of a vocabulary
        that cannot be dealt out evenly, and the bias of a sum on other ranks than 0. These are to
        be zeros.
        """
        c = self.whole
        heads, kv_heads = (slice(some.start * c.head_dim, some.stop * c.head_dim)
                           for some in self._heads())
        each = c.intermediate_size // self.size
        hidden = slice(self.rank * each, (self.rank + 1) * each)
        tokens = slice(min(self.first_token, c.vocab_size),
                       min(self.first_token + self._vocab_rows(), c.vocab_size))
        rows = {
            "q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": hidden,
            "up_proj": hidden, "embed_tokens": tokens, "lm_head": tokens
        }
        columns = {"o_proj": heads, "down_proj": hidden}
        matrix, kind = name.split(".")[-2:]
        if matrix in rows:
            return (rows[matrix],)
        if matrix in columns:
            return (slice(None), columns[matrix]) if kind == "weight" else (
                slice(None if self.rank == 0 else 0),)
        return ()

    def _heads(self) -> tuple[range, range]:
        return heads_of_rank(self.whole.num_heads, self.whole.num_kv_heads, self.size, self.rank)

    def _vocab_rows(self) -> int:
        return -(-self.whole.vocab_size // self.size)
