"""Turns a batch into tensors and runs the model over the paged cache: the plain way, one step at a
time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.attention import backend_name, choose_backend, paged_attention
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder
from paged.sampler import sample
from paged.scheduler import Batch


class ModelRunner:
    """Runs every batch eagerly; the specification of faster runners.

    Args:
        decoder: the model.
        kv: the cache its K and V live in.
        attention_backend: a name of `paged.attention.BACKENDS`, or "auto".
        host_kv: the cache in host memory that preempted requests are swapped to; None if they
            recompute.

    Attributes:
        attention_backend: the name of the backend in use; "auto" is settled here.
        attention: the same for people to read, with the library that serves it: "flash
            (FlashAttention-3)".

    Raises ValueError for a backend that cannot run here, with the reason.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, attention_backend: str = "auto",
                 host_kv: PagedKVCache | None = None):
        self.decoder, self.kv, self.host_kv = decoder, kv, host_kv
        self.device = kv.data.device
        self.scale = kv.head_dim**-0.5
        q = torch.empty(0, decoder.config.num_heads, kv.head_dim, dtype=kv.data.dtype,
                        device=self.device)
        self.attention_backend, _ = choose_backend(
            q, kv.k[0], attention_backend)  # refused now, if it cannot run
        self.attention = backend_name(q, kv.k[0], self.attention_backend)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[int]:
        """One token a request, in order; 0 for a request whose prompt is not yet computed."""
        tokens = [0] * len(batch.requests)
        hidden = self.hidden_states(batch)
        rows = self.sampled_rows(batch)
        if not rows:
            return tokens
        last = torch.tensor([batch.query_start_loc[row + 1] - 1 for row in rows],
                            device=self.device)
        logits = self.decoder.logits(hidden[last])
        chosen, logprobs = sample(logits, [batch.requests[row] for row in rows])
        for row, token in zip(rows, chosen):
            tokens[row] = token
        self.keep_logprobs(batch, rows, logprobs)
        return tokens

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """Move the blocks that the batch moves, write its K and V, and return the hidden states [N,
        hidden]."""
        self.move_blocks(batch)
        if not batch.requests:
            return torch.empty(0, self.decoder.config.hidden_size, device=self.device)
        width = max(map(len, batch.block_tables))
        block_tables = self._int32(
            [table + [0] * (width - len(table)) for table in batch.block_tables])
        slot_mapping = torch.tensor(batch.slot_mapping, device=self.device)
        seq_lens, query_start_loc = self._int32(batch.seq_lens), self._int32(batch.query_start_loc)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.kv.write(layer, slot_mapping, k, v)
            return paged_attention(q, self.kv, layer, block_tables, seq_lens, query_start_loc,
                                   self.scale, backend=self.attention_backend)

        return self.decoder(torch.tensor(batch.input_ids, device=self.device),
                            torch.tensor(batch.positions, device=self.device), attend)

    def move_blocks(self, batch: Batch) -> None:
        """Swap out, copy, swap in, as the batch asks, in this order."""
        copy_between(self.kv, self.host_kv, batch.swap_out)
        self.kv.copy_blocks(batch.block_copies)
        copy_between(self.host_kv, self.kv, batch.swap_in)

    @staticmethod
    def keep_logprobs(batch: Batch, rows: Sequence[int],
                      logprobs: Sequence[dict | None] | None) -> None:
        """Enter what the sampler gave for these rows into batch.logprobs; nothing, if nobody
        asked."""
        if logprobs is not None:
            batch.logprobs = [None] * len(batch.requests)
            for row, entry in zip(rows, logprobs):
                batch.logprobs[row] = entry

    @staticmethod
    def sampled_rows(batch: Batch) -> list[int]:
        """Rows of the batch whose token counts: every token of the request is computed with this
        step."""
        return [
            row for row, request in enumerate(batch.requests)
            if batch.seq_lens[row] == len(request.token_ids)
        ]

    def _int32(self, values: Sequence) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def copy_between(source: PagedKVCache | None, destination: PagedKVCache | None,
                 pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks from one cache to another, in every layer: (source block, destination block)
    pairs."""
    if pairs:
        sources, destinations = (list(blocks) for blocks in zip(*pairs))
        moved = source.data[:, :, sources].to(destination.data.device)
        destination.data[:, :, destinations] = moved
