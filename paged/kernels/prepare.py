"""What the layers of a step start from, out of what stays on the GPU, in one launch.

    ids, or the tokens last drawn ──► embeddings, and the sums of their squares
    lengths, offsets, tables      ──► the position and the slot of every token
    seats                         ──► the block tables of this step's requests, new blocks entered
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "table_width"])
def _prepare_kernel(ids_ptr, seats_ptr, new_blocks_ptr, seq_lens_ptr, query_start_loc_ptr,
                    tables_ptr, tokens_ptr, embedding_ptr, x_ptr, squares_ptr, positions_ptr,
                    slots_ptr, out_tables_ptr, num_tokens, num_rows, table_width, first_token,
                    num_embeddings, PART: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PADDED_ROWS: tl.constexpr,
                    DECODE: tl.constexpr, BLOCKS: tl.constexpr):
    # Of two kinds of programs, the first take one token each: its slot, and its embedding.
    token = tl.program_id(0)
    if token < num_tokens:
        row = token
        if not DECODE:  # the requests that end before this token
            index = tl.arange(0, PADDED_ROWS)
            ends = tl.load(query_start_loc_ptr + 1 + index, mask=index < num_rows, other=2147483647)
            row = tl.sum((ends <= token).to(tl.int32), 0)
        real = row < num_rows
        seat = tl.load(seats_ptr + row, mask=real, other=0).to(tl.int64)
        # How far from the end of its context; a padded row has none, and position −1.
        behind = 1 if DECODE else tl.load(query_start_loc_ptr + row + 1, mask=real, other=0) - token
        position = tl.where(real, tl.load(seq_lens_ptr + row, mask=real, other=0) - behind, -1)
        id = tl.load(ids_ptr + token)
        if id < 0:
            id = tl.load(tokens_ptr + seat)
        slot = tl.full([], -1, tl.int64)
        if position >= 0:
            block = tl.load(new_blocks_ptr + row)  # a decode's new block comes with its row
            if block < 0:
                block = tl.load(tables_ptr + seat * table_width + position // BLOCK_SIZE)
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + token, slot)
        tl.store(positions_ptr + token, position)
        column = tl.arange(0, PADDED_WIDTH)
        here = column < WIDTH
        if PART:
            id = id - first_token
            here = here & (id >= 0) & (id < num_embeddings)
        x = tl.load(embedding_ptr + id.to(tl.int64) * WIDTH + column, mask=here, other=0.0)
        tl.store(x_ptr + token.to(tl.int64) * WIDTH + column, x, mask=column < WIDTH)
        tl.store(squares_ptr + token, tl.sum(x.to(tl.float32) * x.to(tl.float32), 0))
        return
    # The others copy the block table of one request each, and enter its new block.
    row = token - num_tokens
    table = tables_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_width
    new_block = tl.load(new_blocks_ptr + row)
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + row), BLOCK_SIZE)
    for start in range(0, num_blocks, BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        block = tl.load(table + index, mask=index < num_blocks, other=0)
        is_new = (index == num_blocks - 1) & (new_block >= 0)
        block = tl.where(is_new, new_block, block)
        tl.store(table + index, block, mask=is_new)
        tl.store(out_tables_ptr + row.to(tl.int64) * table_width + index, block, mask=index
                 < num_blocks)


def prepare(ids: torch.Tensor, seats: torch.Tensor, new_blocks: torch.Tensor,
            seq_lens: torch.Tensor, query_start_loc: torch.Tensor, tables: torch.Tensor,
            tokens: torch.Tensor, embedding: torch.Tensor, block_size: int,
            first_token: int | None = None) -> tuple[torch.Tensor, ...]:
    """What the layers of a step start from; the plain implementation is `seats.prepare`.

    Args:
        ids: [tokens]; −1 is the token last drawn for the seat.
        seats, new_blocks, seq_lens: [requests]; a new block (else −1) is entered into the seat's
            table as the last of the context. Only rows with one token may have one.
        query_start_loc: [requests + 1]; tokens behind its end are padding. As many tokens as
            requests are one a request.
        tables: [seats, width] block tables; tokens: [seats]; embedding: [vocab, hidden],
            contiguous.
        first_token: of an embedding that holds a part of the vocabulary; the other tokens get
            zeros.

    Returns the embeddings [tokens, hidden], the sums of their squares [tokens, 1], positions and
    slots [tokens], −1 for padding, and the requests' tables [requests, width], in which what lies
    behind a context is anything.
    """
    num_tokens, num_rows, (_, hidden) = len(ids), len(seats), embedding.shape
    new = partial(torch.empty, device=ids.device)
    x = new(num_tokens, hidden, dtype=embedding.dtype)
    squares = new(num_tokens, 1, dtype=torch.float32)
    positions, slots = new(num_tokens, dtype=torch.int32), new(num_tokens, dtype=torch.int64)
    out_tables = new(num_rows, tables.shape[1], dtype=torch.int32)
    _prepare_kernel[
        num_tokens + num_rows,
    ](ids, seats, new_blocks, seq_lens, query_start_loc, tables, tokens, embedding, x, squares,
      positions, slots, out_tables, num_tokens, num_rows, tables.shape[1], first_token or 0,
      len(embedding), PART=first_token is not None, BLOCK_SIZE=block_size, WIDTH=hidden,
      PADDED_WIDTH=triton.next_power_of_2(hidden), PADDED_ROWS=triton.next_power_of_2(num_rows),
      DECODE=num_tokens == num_rows, BLOCKS=256)
    return x, squares, positions, slots, out_tables
