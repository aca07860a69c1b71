"""The next token of every request: penalties, filters and the draw, without a sort and without
waiting for the CPU.

    weigh   every slice of every row: its largest logit, its smallest, its sum of weights
    cut     rows with a filter: the level down to which tokens stay, and the sums of what stays
    draw    one random number a row picks a slice, and reads that slice again to pick the token

A weight is exp((logit − largest) / temperature). top-k, top-p and min-p all keep a beginning of the
tokens in falling order, so one number says what stays, the level; of the tokens exactly at it, the
first by id stay, so many as are needed. The level is found like a number in a guessing game: how
much lies at or above a pivot, for three pivots a pass over the row.

    largest ▁▁▂▂▃▃▄▄▅▅▆▆▇▇ smallest     a pass asks: how much down to │ ? three times
            └──── p of the sum │                    the level is between two of them

The plain implementation is `sampler.draw`, which sorts. The random number is the same function of
seed and place in the text there and here, so a filter that removes nothing changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import LOG2_E, early_launch, start_early
from paged.sampling import (
    FREQUENCY,
    IN_PROMPT,
    MIN_P,
    PRESENCE,
    PROMPT,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

ANY = tl.constexpr(2147483647)  # larger than any token id
# Columns of what a seat holds, and the bit of its history, as constants that kernels may read.
_TEMPERATURE, _TOP_P, _MIN_P = map(tl.constexpr, (TEMPERATURE, TOP_P, MIN_P))
_REPETITION, _PRESENCE, _FREQUENCY = map(tl.constexpr, (REPETITION, PRESENCE, FREQUENCY))
_SEED, _TOP_K, _PROMPT, _IN_PROMPT = map(tl.constexpr, (SEED, TOP_K, PROMPT, IN_PROMPT))
_FLOATS, _INTEGERS = tl.constexpr(FREQUENCY + 1), tl.constexpr(PROMPT + 1)


@triton.jit
def _penalized(floats_ptr, seat):
    """Whether a seat has any penalty."""
    at = floats_ptr + seat * _FLOATS
    return ((tl.load(at + _REPETITION) != 1) | (tl.load(at + _PRESENCE) != 0)
            | (tl.load(at + _FREQUENCY) != 0))


@triton.jit
def _penalize(x, floats_ptr, history_ptr, seat, token, vocab_size):
    """The logits x of some tokens after the penalties of their seat."""
    at = floats_ptr + seat * _FLOATS
    repetition = tl.load(at + _REPETITION)
    seen = tl.load(history_ptr + seat.to(tl.int64) * vocab_size + token, mask=token < vocab_size,
                   other=0).to(tl.int32)
    count = (seen & (_IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - tl.load(at + _FREQUENCY) * count - tl.load(at + _PRESENCE) * (count > 0)


@triton.jit
def _logits(logits_ptr, floats_ptr, history_ptr, row, seat, token, vocab_size,
            PENALIZED: tl.constexpr):
    """The logits of some tokens of a row, after the penalties of its seat, float32."""
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size,
                other=float("-inf")).to(tl.float32)
    if PENALIZED:
        x = _penalize(x, floats_ptr, history_ptr, seat, token, vocab_size)
    return x


@triton.jit
def _sharpness(floats_ptr, seat):
    """What a difference of logits is multiplied by to give the binary logarithm of a weight."""
    return LOG2_E / tl.maximum(tl.load(floats_ptr + seat * _FLOATS + _TEMPERATURE), 1e-6)


@triton.jit
def _weigh_slice(logits, top_ptr, bottom_ptr, index_ptr, weight_ptr, at, token, sharpness):
    top = tl.max(logits, 0)
    broken = tl.max((logits != logits).to(tl.int32), 0) > 0
    tl.store(index_ptr + at, tl.min(tl.where(logits == top, token, ANY), 0))  # the first of equals
    tl.store(top_ptr + at, tl.where(broken, float("nan"), top))
    tl.store(bottom_ptr + at, tl.min(tl.where(logits > float("-inf"), logits, float("inf")), 0))
    weight = tl.exp2((logits - tl.maximum(top, -3e38)) * sharpness)
    tl.store(weight_ptr + at, tl.sum(weight, 0))


@triton.jit
def _weigh_kernel(logits_ptr, seats_ptr, floats_ptr, history_ptr, top_ptr, bottom_ptr, index_ptr,
                  weight_ptr, vocab_size, SLICE: tl.constexpr, EARLY: tl.constexpr):
    # Of one slice of one row: its largest and smallest logit, where the largest stands, and the sum
    # of the weights relative to it.
    start_early(EARLY)
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    at = row * tl.num_programs(1) + tl.program_id(1)
    sharpness = _sharpness(floats_ptr, seat)
    if _penalized(floats_ptr, seat):
        logits = _logits(logits_ptr, floats_ptr, history_ptr, row, seat, token, vocab_size, True)
        _weigh_slice(logits, top_ptr, bottom_ptr, index_ptr, weight_ptr, at, token, sharpness)
    else:
        logits = _logits(logits_ptr, floats_ptr, history_ptr, row, seat, token, vocab_size, False)
        _weigh_slice(logits, top_ptr, bottom_ptr, index_ptr, weight_ptr, at, token, sharpness)


@triton.jit
def _tokens(start, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """LINES × COLUMNS tokens; a thread holds whole columns, so that sums over lines are its own."""
    return start + tl.arange(0, LINES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _asked_for(row_ptr, start, vocab_size, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The next logits as they are, asked for before those at hand are worked on."""
    token = _tokens(start, LINES, COLUMNS)
    return tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def _on_grid(x, more, SHIFT: tl.constexpr):
    """The smallest number from x up that has SHIFT trailing zeros, or the one that many after it:
    numbers in falling order are integers in falling order, once the sign is folded."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = ((key + ((1 << SHIFT) - 1)) >> SHIFT) + more << SHIFT
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _level(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, low, best, sharpness, target,
           COUNT: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
           PENALIZED: tl.constexpr):
    """The largest logit such that it and all above it hold at least `target`, of tokens with COUNT,
    else of weight relative to the best; `low`, if there is none. Between two neighbours on the grid
    of the logits' dtype there is nothing left to guess."""
    # Trailing zeros of a float32 that was narrower, or of none if penalties have changed it.
    narrow: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    is_half: tl.constexpr = logits_ptr.dtype.element_ty == tl.float16
    SHIFT: tl.constexpr = 0 if PENALIZED or not narrow else 13 if is_half else 16
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    low, high = _on_grid(low, 0, SHIFT), _on_grid(best, 1, SHIFT)  # all is below `high`
    after = _on_grid(low, 1, SHIFT)
    while after < high:
        before = _on_grid(high, -1, SHIFT)  # pivots lie between the two: each pass gains something
        first = _on_grid(low * 0.75 + high * 0.25, 0, SHIFT)
        second = _on_grid(low * 0.5 + high * 0.5, 0, SHIFT)
        third = _on_grid(low * 0.25 + high * 0.75, 0, SHIFT)
        first = tl.minimum(tl.maximum(first, after), before)
        second = tl.minimum(tl.maximum(second, after), before)
        third = tl.minimum(tl.maximum(third, after), before)
        sums_1 = tl.zeros([COLUMNS], tl.float32)
        sums_2 = tl.zeros([COLUMNS], tl.float32)
        sums_3 = tl.zeros([COLUMNS], tl.float32)
        ahead = _asked_for(row_ptr, 0, vocab_size, LINES, COLUMNS)
        for start in range(0, vocab_size, LINES * COLUMNS):
            x = ahead.to(tl.float32)
            ahead = _asked_for(row_ptr, start + LINES * COLUMNS, vocab_size, LINES, COLUMNS)
            if PENALIZED:
                x = _penalize(x, floats_ptr, history_ptr, seat, _tokens(start, LINES, COLUMNS),
                              vocab_size)
            mass = tl.full([LINES, COLUMNS], 1.0, tl.float32)
            if not COUNT:
                mass = tl.exp2((x - best) * sharpness)
            sums_1 += tl.sum(tl.where(x >= first, mass, 0.0), 0)
            sums_2 += tl.sum(tl.where(x >= second, mass, 0.0), 0)
            sums_3 += tl.sum(tl.where(x >= third, mass, 0.0), 0)
        if tl.sum(sums_3, 0) >= target:
            low = third
        elif tl.sum(sums_2, 0) >= target:
            low, high = second, third
        elif tl.sum(sums_1, 0) >= target:
            low, high = first, second
        else:
            high = first
        after = _on_grid(low, 1, SHIFT)
    return low


@triton.jit
def _above(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, level, best, sharpness,
           LINES: tl.constexpr, COLUMNS: tl.constexpr, PENALIZED: tl.constexpr):
    """How many tokens lie above a level, their weight, and how many lie at it."""
    count = tl.zeros([COLUMNS], tl.int32)
    ties = tl.zeros([COLUMNS], tl.int32)
    weight = tl.zeros([COLUMNS], tl.float32)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    ahead = _asked_for(row_ptr, 0, vocab_size, LINES, COLUMNS)
    for start in range(0, vocab_size, LINES * COLUMNS):
        x = ahead.to(tl.float32)
        ahead = _asked_for(row_ptr, start + LINES * COLUMNS, vocab_size, LINES, COLUMNS)
        if PENALIZED:
            x = _penalize(x, floats_ptr, history_ptr, seat, _tokens(start, LINES, COLUMNS),
                          vocab_size)
        count += tl.sum((x > level).to(tl.int32), 0)
        ties += tl.sum((x == level).to(tl.int32), 0)
        weight += tl.sum(tl.where(x > level, tl.exp2((x - best) * sharpness), 0.0), 0)
    return tl.sum(count, 0), tl.sum(weight, 0), tl.sum(ties, 0)


@triton.jit
def _cut(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, low, best, sharpness, top_k,
         top_p, LINES: tl.constexpr, COLUMNS: tl.constexpr, PENALIZED: tl.constexpr):
    """The level of a row, and how many of the tokens at it stay, ANY for all."""
    level = low
    stay, ties = tl.full([], ANY, tl.int32), 0
    if top_k > 0:
        level = _level(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, low, best,
                       sharpness, top_k.to(tl.float32), True, LINES, COLUMNS, PENALIZED)
    if (top_k > 0) | (top_p < 1):
        count, weight, ties = _above(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size,
                                     level, best, sharpness, LINES, COLUMNS, PENALIZED)
        stay = ties
        if top_k > 0:
            stay = tl.minimum(ties, (top_k - count).to(tl.int32))
        if top_p < 1:
            # A share is reached when rounding alone keeps the sum from it.
            total = weight + stay.to(tl.float32) * tl.exp2((level - best) * sharpness)
            target = top_p * (1 - 1e-6) * total
            lower = level
            level = _level(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, lower, best,
                           sharpness, target, False, LINES, COLUMNS, PENALIZED)
            count, weight, ties = _above(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size,
                                         level, best, sharpness, LINES, COLUMNS, PENALIZED)
            missing = (target - weight) / tl.maximum(tl.exp2((level - best) * sharpness), 1e-38)
            needed = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)), 1.0).to(tl.int32)
            stay = tl.minimum(needed, tl.where(level == lower, stay, ties))
        stay = tl.where(stay == ties, ANY, stay)
    return level, stay


@triton.jit
def _stays(x, level, stay, ties_before, AXIS: tl.constexpr):
    """Which tokens of a slice stay: those above the level, and the first `stay` at it."""
    tie = (x == level).to(tl.int32)
    return (x > level) | ((tie > 0) & (ties_before + tl.cumsum(tie, AXIS) <= stay))


@triton.jit
def _weigh_what_stays(logits_ptr, floats_ptr, history_ptr, top_ptr, weight_ptr, ties_ptr, row, seat,
                      vocab_size, level, stay, sharpness, SLICES: tl.constexpr, SLICE: tl.constexpr,
                      LINES: tl.constexpr, PENALIZED: tl.constexpr):
    """Replace the sums of the slices by those of the tokens that stay, and note in front of which
    slice how many tokens stand at the level."""
    before = 0
    for first in range(0, SLICES, LINES):  # LINES slices at once
        slice = first + tl.arange(0, LINES)
        at, real = row * SLICES + slice, slice < SLICES
        x = _logits(logits_ptr, floats_ptr, history_ptr, row, seat,
                    _tokens(first * SLICE, LINES, SLICE), vocab_size, PENALIZED)
        top = tl.load(top_ptr + at, mask=real, other=0.0)
        weight = tl.exp2((x - tl.maximum(top, -3e38)[:, None]) * sharpness)
        if stay == ANY:
            weight = tl.where(x >= level, weight, 0.0)
        else:
            ties = tl.sum((x == level).to(tl.int32), 1)
            ties_before = before + tl.cumsum(ties, 0) - ties
            weight = tl.where(_stays(x, level, stay, ties_before[:, None], 1), weight, 0.0)
            tl.store(ties_ptr + at, ties_before, mask=real)
            before += tl.sum(ties, 0)
        tl.store(weight_ptr + at, tl.sum(weight, 1), mask=real)


@triton.jit
def _cut_row(logits_ptr, floats_ptr, integers_ptr, history_ptr, top_ptr, weight_ptr, ties_ptr, row,
             seat, vocab_size, low, best, sharpness, SLICES: tl.constexpr, SLICE: tl.constexpr,
             LINES: tl.constexpr, COLUMNS: tl.constexpr, PENALIZED: tl.constexpr):
    """Level and `stay` of a row with a filter, and what stays of its slices, in their place."""
    level, stay = _cut(logits_ptr, floats_ptr, history_ptr, row, seat, vocab_size, low, best,
                       sharpness, tl.load(integers_ptr + seat * _INTEGERS + _TOP_K),
                       tl.load(floats_ptr + seat * _FLOATS + _TOP_P), LINES, COLUMNS, PENALIZED)
    _weigh_what_stays(logits_ptr, floats_ptr, history_ptr, top_ptr, weight_ptr, ties_ptr, row, seat,
                      vocab_size, level, stay, sharpness, SLICES, SLICE, LINES, PENALIZED)
    return level, stay


@triton.jit
def _cut_kernel(logits_ptr, seats_ptr, floats_ptr, integers_ptr, history_ptr, top_ptr, bottom_ptr,
                weight_ptr, ties_ptr, level_ptr, stay_ptr, vocab_size, SLICES: tl.constexpr,
                PADDED: tl.constexpr, SLICE: tl.constexpr, LINES: tl.constexpr,
                COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    top_k = tl.load(integers_ptr + seat * _INTEGERS + _TOP_K)
    min_p = tl.load(floats_ptr + seat * _FLOATS + _MIN_P)
    filtered = (((top_k > 0) & (top_k < vocab_size)) | (min_p > 0)
                | (tl.load(floats_ptr + seat * _FLOATS + _TOP_P) < 1))
    tl.store(level_ptr + row, float("-inf"))
    if (filtered == 0) | (tl.load(floats_ptr + seat * _FLOATS + _TEMPERATURE) == 0):
        return
    part = tl.arange(0, PADDED)
    at = row * SLICES + part
    tops = tl.load(top_ptr + at, mask=part < SLICES, other=float("-inf"))
    best = tl.max(tops, 0)
    broken = (tl.max((tops != tops).to(tl.int32), 0) > 0) | (tl.abs(best) == float("inf"))
    if broken:
        return
    sharpness = _sharpness(floats_ptr, seat)
    low = tl.min(tl.load(bottom_ptr + at, mask=part < SLICES, other=float("inf")), 0)
    if min_p > 0:
        low = tl.maximum(low, best + tl.log2(min_p) / sharpness)
    if _penalized(floats_ptr, seat):
        level, stay = _cut_row(logits_ptr, floats_ptr, integers_ptr, history_ptr, top_ptr,
                               weight_ptr, ties_ptr, row, seat, vocab_size, low, best, sharpness,
                               SLICES, SLICE, LINES, COLUMNS, True)
    else:
        level, stay = _cut_row(logits_ptr, floats_ptr, integers_ptr, history_ptr, top_ptr,
                               weight_ptr, ties_ptr, row, seat, vocab_size, low, best, sharpness,
                               SLICES, SLICE, LINES, COLUMNS, False)
    tl.store(level_ptr + row, level)
    tl.store(stay_ptr + row, stay)


@triton.jit
def _mix(x):
    """SplitMix64 (Steele et al., 2014), as in `sampler.uniform`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, place):
    """A multiple of 2⁻²³ in [0, 1): a function of a seed and of the place of a token in its text."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + place.to(tl.uint64))
    return (mixed >> 41).to(tl.int32).to(tl.float32) * (1.0 / 8388608)


@triton.jit
def _first_above(weight, threshold, place):
    """The first place where the running sum of the weights passes the threshold, never one of
    weight 0."""
    running = tl.cumsum(weight, 0)
    passed = (running > threshold) & (weight > 0)
    first = tl.min(tl.where(passed, place, ANY), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, place, 0), 0))  # rounding: the last one


@triton.jit
def _draw_kernel(logits_ptr, seats_ptr, seq_lens_ptr, samples_ptr, floats_ptr, integers_ptr,
                 history_ptr, top_ptr, index_ptr, weight_ptr, ties_ptr, level_ptr, stay_ptr,
                 tokens_ptr, out_ptr, turn_ptr, vocab_size, out_width, SLICES: tl.constexpr,
                 PADDED: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    temperature = tl.load(floats_ptr + seat * _FLOATS + _TEMPERATURE)
    penalized = _penalized(floats_ptr, seat)
    part = tl.arange(0, PADDED)
    at = row * SLICES + part
    inside = part < SLICES
    tops = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    best = tl.max(tops, 0)
    broken = (tl.max((tops != tops).to(tl.int32), 0) > 0) | (tl.abs(best) == float("inf"))
    index = tl.load(index_ptr + at, mask=inside, other=ANY)
    chosen = tl.min(tl.where(tops == best, index, ANY), 0)
    if (temperature > 0) & (broken == 0):
        sharpness = _sharpness(floats_ptr, seat)
        weights = tl.load(weight_ptr + at, mask=inside, other=0.0)
        weights = tl.where(inside & (tops > float("-inf")),
                           weights * tl.exp2((tops - best) * sharpness), 0.0)
        seed = tl.load(integers_ptr + seat * _INTEGERS + _SEED)
        place = tl.load(seq_lens_ptr + row) - tl.load(integers_ptr + seat * _INTEGERS + _PROMPT)
        threshold = _uniform(seed, place) * tl.sum(weights, 0)
        slice = _first_above(weights, threshold, part)
        threshold -= tl.sum(tl.where(part < slice, weights, 0.0), 0)
        token = slice * SLICE + tl.arange(0, SLICE)
        if penalized:
            logits = _logits(logits_ptr, floats_ptr, history_ptr, row, seat, token, vocab_size,
                             True)
        else:
            logits = _logits(logits_ptr, floats_ptr, history_ptr, row, seat, token, vocab_size,
                             False)
        weight = tl.exp2((logits - best) * sharpness)
        level = tl.load(level_ptr + row)
        if level > float("-inf"):
            stay = tl.load(stay_ptr + row)
            if stay == ANY:
                weight = tl.where(logits >= level, weight, 0.0)
            else:
                before = tl.load(ties_ptr + row * SLICES + slice)
                weight = tl.where(_stays(logits, level, stay, before, 0), weight, 0.0)
        chosen = _first_above(weight, threshold, token)
    tl.store(out_ptr + tl.load(turn_ptr) * out_width + row, tl.where(broken, -1, chosen))
    if (tl.load(samples_ptr + row) > 0) & (broken == 0):  # else: in the middle of a prompt
        tl.store(tokens_ptr + seat, chosen)
        if penalized:
            place = history_ptr + seat.to(tl.int64) * vocab_size + chosen
            seen = tl.load(place)
            tl.store(place, tl.where((seen & (_IN_PROMPT - 1)) < _IN_PROMPT - 1, seen + 1, seen))


LINES, COLUMNS, WARPS = 4, 4096, 16


def sample(logits: torch.Tensor, seats: torch.Tensor, seq_lens: torch.Tensor, samples: torch.Tensor,
           state, out: torch.Tensor, turn: torch.Tensor) -> None:
    """Draw the next token of every row; the largest logit's at temperature 0.

    Args:
        logits: [rows, vocab_size], contiguous. A row with NaN or infinity, or with nothing above
            −infinity, gives −1.
        seats, seq_lens: [rows]; the seat of each row, and the length of its context.
        samples: [rows], 0 for a row whose token does not count.
        state: the `seats.Seats`; the token goes to its tokens[seat] and into its history.
        out: [turns, at least rows], the token goes to out[turn, row]; turn: [1], on the GPU.
    """
    num_rows, vocab_size = logits.shape
    slice_size = min(4096, max(16, triton.next_power_of_2(vocab_size)))
    slices = triton.cdiv(vocab_size, slice_size)
    top, bottom, weight = torch.empty(3, num_rows, slices, dtype=torch.float32,
                                      device=logits.device)
    index, ties = torch.empty(2, num_rows, slices, dtype=torch.int32, device=logits.device)
    level = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    stay = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    shape = {"SLICES": slices, "PADDED": triton.next_power_of_2(slices), "SLICE": slice_size}
    early = early_launch(logits.device)
    floats, integers, history = state.floats, state.integers, state.history
    _weigh_kernel[num_rows, slices](logits, seats, floats, history, top, bottom, index, weight,
                                    vocab_size, SLICE=slice_size, **early)
    # As many columns as 16 warps load at once, 8 a thread.
    _cut_kernel[
        num_rows,
    ](logits, seats, floats, integers, history, top, bottom, weight, ties, level, stay, vocab_size,
      LINES=4, COLUMNS=slice_size, num_warps=16, **shape, **early)
    _draw_kernel[
        num_rows,
    ](logits, seats, seq_lens, samples, floats, integers, history, top, index, weight, ties, level,
      stay, state.tokens, out, turn, vocab_size, out.shape[1], **shape, **early)
