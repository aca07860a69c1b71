"""All layers of a decode step in one persistent kernel: the parts of the chained kernels, without
the seams of their launches.

As many programs as the card has multiprocessors stay from the first layer to the last. A layer is
five phases; in each, the programs deal out its items among themselves:

    phase        an item is                                  the function, shared with the chain
    qkv          a head of Q, K or V, or part of its width   products.qkv_head
    attention    a program's share of the line of tiles      decode.decode_share
    output       a tile of outputs, or part of its width     products.product_tile
    gate_up      a tile of outputs, or part of its width     products.product_tile
    down         a tile of outputs, or part of its width     products.product_tile

Between two phases each program counts itself in at one counter, asks for its weights of the phase
after the next to be brought to the L2 cache, and waits until all are there: weights depend on
nothing, and the memory keeps reading while programs wait for each other.

It cannot deadlock: a launch has no more programs than run at once (a cooperative launch, which the
driver refuses otherwise), every program counts itself in once a phase, and none waits before it
has. Without a GPU there is nothing to wait for: each phase is a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged.kernels.decode import decode_share, equal_shares
from paged.kernels.products import norm_scale, product_tile, qkv_head

PHASES = 5
OUTPUTS = 64  # of a tile
WEIGHTS = 7  # of a layer, in this order
_QKV, _OUT, _GATE_UP, _DOWN, _BIAS, _Q_NORM, _K_NORM = map(tl.constexpr, range(WEIGHTS))


@triton.jit
def _weight(base_ptr, places_ptr, index):
    """Where a weight begins: a place is counted from the first weight, in steps of 16 bytes."""
    STEP: tl.constexpr = 128 // base_ptr.dtype.element_ty.primitive_bitwidth
    return base_ptr + tl.load(places_ptr + index) * STEP


@triton.jit
def _product(x_ptr, weight_ptr, scale, residual_ptr, out_ptr, out_squares_ptr, partial_ptr,
             counter_ptr, token, valid, NUM_OUTPUTS: tl.constexpr, SILU: tl.constexpr,
             OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
             SPLIT: tl.constexpr):
    """This program's items of a product: of gate and up, scaled, or else with the residual."""
    items = (NUM_OUTPUTS + OUTPUTS - 1) // OUTPUTS * SPLIT
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // SPLIT
        product_tile(x_ptr, weight_ptr, scale, residual_ptr, out_ptr, out_squares_ptr, partial_ptr,
                     counter_ptr, token, valid, tile, tile, item % SPLIT, NUM_OUTPUTS, SILU, SILU,
                     not SILU, OUTPUTS, COLUMNS, WIDTH, SPLIT)


@triton.jit
def _fetch(weight_ptr, items, STEP: tl.constexpr, ROWS: tl.constexpr, PAIR: tl.constexpr,
           NUM_ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Ask for the weights of this program's items to be brought to the L2 cache, 128 bytes a
    request: ROWS from each STEP, with PAIR also those NUM_ROWS behind."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (COLUMNS + LINE - 1) // LINE
    own: tl.constexpr = (WIDTH + SPLIT * COLUMNS - 1) // (SPLIT * COLUMNS) * COLUMNS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // SPLIT * STEP + tl.arange(0, ROWS)
        for start in range(0, own, COLUMNS):
            column = item % SPLIT * own + start + tl.arange(0, LINES) * LINE
            at = row.to(tl.int64)[:, None] * WIDTH + tl.minimum(column, WIDTH - 1)[None, :]
            inside = (row < NUM_ROWS)[:, None] & (column < WIDTH)[None, :]
            at = tl.where(inside, at, 0)
            _ask(weight_ptr + at)
            if PAIR:
                _ask(weight_ptr + NUM_ROWS * WIDTH + at)


@triton.jit
def _ask(pointers):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                              [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _count_in(counter_ptr):
    tl.debug_barrier()  # all threads of this program have stored
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def _wait_for(counter_ptr, count):
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=["num_tokens", "first_phase", "end_phase", "table_stride", "layer_stride"])
def layers_kernel(
        x_ptr, first_squares_ptr, squares_ptr, q_ptr, mixed_ptr, hidden_ptr, base_ptr, places_ptr,
        k_ptr, v_ptr, positions_ptr, slots_ptr, rotation_ptr, tables_ptr, seq_lens_ptr,
        query_start_loc_ptr, partial_ptr, counter_ptr, arrived_ptr, eps, scale, num_tokens,
        first_phase, end_phase, table_stride, layer_stride, k_block, k_row, NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
        HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
        BIAS: tl.constexpr, GAP: tl.constexpr, CONVERTS: tl.constexpr, TOKENS: tl.constexpr,
        COLUMNS: tl.constexpr, QKV_SPLIT: tl.constexpr, OUT_SPLIT: tl.constexpr,
        GATE_UP_SPLIT: tl.constexpr, DOWN_SPLIT: tl.constexpr, TILE: tl.constexpr,
        HEADS: tl.constexpr, PADDED_GROUP: tl.constexpr, PADDED_DIM: tl.constexpr,
        PADDED_REQUESTS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
        PHASES: tl.constexpr, WEIGHTS: tl.constexpr, OUTPUTS: tl.constexpr, TOGETHER: tl.constexpr):
    MIXED: tl.constexpr = NUM_HEADS * HEAD_DIM
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    X_TILES: tl.constexpr = (HIDDEN + OUTPUTS - 1) // OUTPUTS
    INNER_TILES: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    QKV_ITEMS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * QKV_SPLIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    token = tl.arange(0, TOKENS)
    valid = token < num_tokens
    tiles, ends, total, share = equal_shares(seq_lens_ptr, query_start_loc_ptr, num_tokens,
                                             NUM_KV_HEADS, TILE, PADDED_REQUESTS)
    for number in range(first_phase, end_phase):
        layer, phase = number // PHASES, number % PHASES
        places = places_ptr + layer * WEIGHTS
        k_cache = k_ptr + layer * layer_stride.to(tl.int64)
        v_cache = v_ptr + layer * layer_stride.to(tl.int64)
        if phase == 0:
            if layer == 0:
                norm = norm_scale(first_squares_ptr, token, valid, eps, 1, HIDDEN, 1)
            else:
                norm = norm_scale(squares_ptr, token, valid, eps, X_TILES, HIDDEN, PARTS)
            weight = _weight(base_ptr, places, _QKV)
            bias = _weight(base_ptr, places, _BIAS)
            q_norm = _weight(base_ptr, places, _Q_NORM)
            k_norm = _weight(base_ptr, places, _K_NORM)
            for item in range(program, QKV_ITEMS, programs):
                qkv_head(x_ptr, weight, norm, bias, positions_ptr, slots_ptr, rotation_ptr, q_norm,
                         k_norm, q_ptr, k_cache, v_cache, partial_ptr, counter_ptr, eps, token,
                         valid, k_block, k_row, item // QKV_SPLIT, item // QKV_SPLIT,
                         item % QKV_SPLIT, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NORM,
                         BIAS, GAP, True, HALF, COLUMNS, HIDDEN, QKV_SPLIT)
        elif phase == 1:
            decode_share(q_ptr, k_cache, v_cache, mixed_ptr, partial_ptr, counter_ptr, tables_ptr,
                         seq_lens_ptr, query_start_loc_ptr, scale, table_stride, MIXED, tiles, ends,
                         total, share, NUM_KV_HEADS, GROUP, HEAD_DIM, PADDED_DIM, TILE,
                         PADDED_GROUP, BLOCK_SIZE, HEADS, PIECES, GAP, CONVERTS)
        elif phase == 2:
            _product(mixed_ptr, _weight(base_ptr, places,
                                        _OUT), 1.0, x_ptr, x_ptr, squares_ptr, partial_ptr,
                     counter_ptr, token, valid, HIDDEN, False, OUTPUTS, COLUMNS, MIXED, OUT_SPLIT)
        elif phase == 3:
            norm = norm_scale(squares_ptr, token, valid, eps, X_TILES, HIDDEN, PARTS)
            _product(x_ptr, _weight(base_ptr, places, _GATE_UP), norm, x_ptr, hidden_ptr,
                     squares_ptr, partial_ptr, counter_ptr, token, valid, INNER, True, OUTPUTS,
                     COLUMNS, HIDDEN, GATE_UP_SPLIT)
        else:
            _product(hidden_ptr, _weight(base_ptr, places,
                                         _DOWN), 1.0, x_ptr, x_ptr, squares_ptr, partial_ptr,
                     counter_ptr, token, valid, HIDDEN, False, OUTPUTS, COLUMNS, INNER, DOWN_SPLIT)
        if TOGETHER:
            _count_in(arrived_ptr)
            # Of the product after the next one: the next may have begun to read its own.
            if phase == 0:
                _fetch(_weight(base_ptr, places, _OUT), X_TILES * OUT_SPLIT, OUTPUTS, OUTPUTS,
                       False, HIDDEN, COLUMNS, MIXED, OUT_SPLIT)
            elif phase == 1:
                _fetch(_weight(base_ptr, places, _GATE_UP), INNER_TILES * GATE_UP_SPLIT, OUTPUTS,
                       OUTPUTS, True, INNER, COLUMNS, HIDDEN, GATE_UP_SPLIT)
            elif phase == 2:
                _fetch(_weight(base_ptr, places, _DOWN), X_TILES * DOWN_SPLIT, OUTPUTS, OUTPUTS,
                       False, HIDDEN, COLUMNS, INNER, DOWN_SPLIT)
            elif (phase == 3) & (number + 2 < end_phase):
                _fetch(_weight(base_ptr, places + WEIGHTS, _QKV), QKV_ITEMS, HEAD_DIM, 2 * HALF,
                       False, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, COLUMNS, HIDDEN, QKV_SPLIT)
            if number + 1 < end_phase:
                _wait_for(arrived_ptr, (number + 1 - first_phase) * programs)
    if TOGETHER:  # who counts itself in last leaves a zero for the next step
        phases = end_phase - first_phase
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == (phases + 1) * programs - 1:
            tl.store(arrived_ptr, 0)
