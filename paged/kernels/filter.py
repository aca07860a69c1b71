"""What top-k, top-p and min-p leave of a row of logits, without a sort.

All three keep a beginning of the tokens in falling order, so one number says what stays, the level;
of the tokens exactly at it, the first by id stay, as many as are needed. The level is found like a
number in a guessing game: how much lies at or above a pivot, for three pivots a pass over the row.

    largest ▁▁▂▂▃▃▄▄▅▅▆▆▇▇ smallest     a pass asks: how much down to │ ? three times
            └──── p of the sum │                    the level is between two of them

A weight is exp((logit − largest) / temperature). Rules and penalties are applied wherever logits
are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged.kernels.common import LOG2_E
from paged.rules import BIAS, COUNT, FROM, IN_PROMPT, MOST_MARKS
from paged.sampling import (
    FREQUENCY,
    HAS_HISTORY,
    PRESENCE,
    PROMPT,
    REPETITION,
    TEMPERATURE,
    WORD_TOKENS,
)

ANY = tl.constexpr(2147483647)  # larger than any token id
# Where a seat keeps what it asks for, and the bit of its history, as constants kernels may read.
_TEMPERATURE, _REPETITION = map(tl.constexpr, (TEMPERATURE, REPETITION))
_PRESENCE, _FREQUENCY, _HAS_HISTORY = map(tl.constexpr, (PRESENCE, FREQUENCY, HAS_HISTORY))
_BIAS, _FROM, _COUNT = map(tl.constexpr, (BIAS, FROM, COUNT))
_IN_PROMPT, _MARKS, _PROMPT = map(tl.constexpr, (IN_PROMPT, MOST_MARKS, PROMPT))
_FLOATS, _INTEGERS = tl.constexpr(HAS_HISTORY + 1), tl.constexpr(WORD_TOKENS + 1)


@triton.jit
def seat_of(row, seat, floats_ptr, integers_ptr, history_ptr, marks_ptr, seq_lens_ptr, vocab_size):
    """Where the numbers and integers, history and marks of a row's seat are, and its length."""
    return (floats_ptr + seat * _FLOATS, integers_ptr + seat * _INTEGERS,
            history_ptr + seat * vocab_size, marks_ptr + seat * 3 * _MARKS, seq_lens_ptr + row)


@triton.jit
def has_history(asks):
    """Whether penalties or rules change the logits of a seat; `asks` points at its numbers."""
    return tl.load(asks + _HAS_HISTORY) > 0


@triton.jit
def _amend(x, seat, token, vocab_size):
    """The logits x of some tokens after the rules and the penalties of their seat."""
    asks, integers, history, marks, length = seat
    place = tl.load(length) - tl.load(integers + _PROMPT)
    seen = tl.load(history + token, mask=token < vocab_size, other=0).to(tl.int32)
    marked, number = seen < 0, seen & (_IN_PROMPT - 1)
    bias = tl.load(marks + _BIAS * _MARKS + number, mask=marked, other=0)
    first = tl.load(marks + _FROM * _MARKS + number, mask=marked, other=0)
    count = tl.load(marks + _COUNT * _MARKS + number, mask=marked, other=0)
    x = tl.where(marked, x + bias.to(tl.float32, bitcast=True), x)
    x = tl.where(marked & (place < first), float("-inf"), x)
    count = tl.where(marked, count, number)
    repetition = tl.load(asks + _REPETITION)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where((count > 0) | ((seen & _IN_PROMPT) > 0), repeated, x)
    return (x - tl.load(asks + _FREQUENCY) * count.to(tl.float32) - tl.load(asks + _PRESENCE) *
            (count > 0))


@triton.jit
def logits_of(row, seat, token, vocab_size, AMENDED: tl.constexpr):
    """The logits of some tokens of a row, after the rules and penalties of its seat, float32.

    seat: as `seat_of` gives it.
    """
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    if AMENDED:
        x = _amend(x, seat, token, vocab_size)
    return x


@triton.jit
def sharpness_of(asks):
    """What a difference of logits is multiplied by to give the binary logarithm of a weight."""
    return LOG2_E / tl.maximum(tl.load(asks + _TEMPERATURE), 1e-6)


@triton.jit
def _tokens(start, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """LINES × COLUMNS tokens; a thread holds whole columns, so that sums over lines are its own."""
    return start + tl.arange(0, LINES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _asked_for(row, start, vocab_size, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The next logits as they are, asked for before those at hand are worked on."""
    token = _tokens(start, LINES, COLUMNS)
    return tl.load(row + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def _on_grid(x, more, SHIFT: tl.constexpr):
    """The smallest number from x up that has SHIFT trailing zeros, or the one that many after it:
    numbers in falling order are integers in falling order, once the sign is folded."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = ((key + ((1 << SHIFT) - 1)) >> SHIFT) + more << SHIFT
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _level(row, seat, vocab_size, low, best, sharpness, target, COUNT: tl.constexpr,
           LINES: tl.constexpr, COLUMNS: tl.constexpr, AMENDED: tl.constexpr):
    """The largest logit such that it and all above it hold at least `target`, of tokens with COUNT,
    else of weight relative to the best; `low`, if there is none. Between two neighbours on the grid
    of the logits' dtype there is nothing left to guess."""
    # Trailing zeros of a float32 that was narrower, or of none if it was amended.
    narrow: tl.constexpr = row.dtype.element_ty.primitive_bitwidth == 16
    is_half: tl.constexpr = row.dtype.element_ty == tl.float16
    SHIFT: tl.constexpr = 0 if AMENDED or not narrow else 13 if is_half else 16
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
        ahead = _asked_for(row, 0, vocab_size, LINES, COLUMNS)
        for start in range(0, vocab_size, LINES * COLUMNS):
            x = ahead.to(tl.float32)
            ahead = _asked_for(row, start + LINES * COLUMNS, vocab_size, LINES, COLUMNS)
            if AMENDED:
                x = _amend(x, seat, _tokens(start, LINES, COLUMNS), vocab_size)
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
def _above(row, seat, vocab_size, level, best, sharpness, LINES: tl.constexpr,
           COLUMNS: tl.constexpr, AMENDED: tl.constexpr):
    """How many tokens lie above a level, their weight, and how many lie at it."""
    count = tl.zeros([COLUMNS], tl.int32)
    ties = tl.zeros([COLUMNS], tl.int32)
    weight = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab_size, LINES * COLUMNS):
        x = logits_of(row, seat, _tokens(start, LINES, COLUMNS), vocab_size, AMENDED)
        count += tl.sum((x > level).to(tl.int32), 0)
        ties += tl.sum((x == level).to(tl.int32), 0)
        weight += tl.sum(tl.where(x > level, tl.exp2((x - best) * sharpness), 0.0), 0)
    return tl.sum(count, 0), tl.sum(weight, 0), tl.sum(ties, 0)


@triton.jit
def cut(row, seat, vocab_size, low, best, sharpness, top_k, top_p, LINES: tl.constexpr,
        COLUMNS: tl.constexpr, AMENDED: tl.constexpr):
    """The level of a row of which min-p leaves what lies from `low` up, and how many of the tokens
    at the level stay, ANY for all."""
    level, stay, ties = low, tl.full([], ANY, tl.int32), 0
    if top_k > 0:
        level = _level(row, seat, vocab_size, low, best, sharpness, top_k.to(tl.float32), True,
                       LINES, COLUMNS, AMENDED)
    if (top_k > 0) | (top_p < 1):
        count, weight, ties = _above(row, seat, vocab_size, level, best, sharpness, LINES, COLUMNS,
                                     AMENDED)
        stay = ties
        if top_k > 0:
            stay = tl.minimum(ties, (top_k - count).to(tl.int32))
        if top_p < 1:
            # A share is reached when rounding alone keeps the sum from it.
            total = weight + stay.to(tl.float32) * tl.exp2((level - best) * sharpness)
            target, lower = top_p * (1 - 1e-6) * total, level
            level = _level(row, seat, vocab_size, lower, best, sharpness, target, False, LINES,
                           COLUMNS, AMENDED)
            count, weight, ties = _above(row, seat, vocab_size, level, best, sharpness, LINES,
                                         COLUMNS, AMENDED)
            missing = (target - weight) / tl.maximum(tl.exp2((level - best) * sharpness), 1e-38)
            needed = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)), 1.0).to(tl.int32)
            stay = tl.minimum(needed, tl.where(level == lower, stay, ties))
        stay = tl.where(stay == ties, ANY, stay)
    return level, stay


@triton.jit
def stays(x, level, stay, ties_before, AXIS: tl.constexpr):
    """Which tokens of a slice stay: those above the level, and the first `stay` at it."""
    tie = (x == level).to(tl.int32)
    return (x > level) | ((tie > 0) & (ties_before + tl.cumsum(tie, AXIS) <= stay))


@triton.jit
def weigh_what_stays(row, seat, tops, weights, ties_before, vocab_size, level, stay, sharpness,
                     SLICES: tl.constexpr, SLICE: tl.constexpr, LINES: tl.constexpr,
                     AMENDED: tl.constexpr):
    """Replace the sums of a row's slices by those of the tokens that stay, and note in front of
    which slice how many tokens stand at the level."""
    before = 0
    for first in range(0, SLICES, LINES):  # LINES slices at once
        slice = first + tl.arange(0, LINES)
        real = slice < SLICES
        x = logits_of(row, seat, _tokens(first * SLICE, LINES, SLICE), vocab_size, AMENDED)
        top = tl.load(tops + slice, mask=real, other=0.0)
        weight = tl.exp2((x - tl.maximum(top, -3e38)[:, None]) * sharpness)
        if stay == ANY:
            weight = tl.where(x >= level, weight, 0.0)
        else:
            ties = tl.sum((x == level).to(tl.int32), 1)
            earlier = before + tl.cumsum(ties, 0) - ties
            weight = tl.where(stays(x, level, stay, earlier[:, None], 1), weight, 0.0)
            tl.store(ties_before + slice, earlier, mask=real)
            before += tl.sum(ties, 0)
        tl.store(weights + slice, tl.sum(weight, 1), mask=real)
