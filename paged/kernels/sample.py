"""The next token of every request: penalties, filters and the draw, without waiting for the CPU.

    weigh   every slice of every row: its largest logit, its smallest, its sum of weights
    cut     rows with a filter: the level down to which tokens stay, and the sums of what stays
    draw    one random number a row picks a slice, and reads that slice again to pick the token

The plain implementation is `sampler.draw`, which sorts. The random number is the same function of
seed and place in the text there and here, so a filter that removes nothing changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.common import early_launch, start_early
from paged.kernels.filter import (
    ANY,
    cut,
    has_history,
    logits_of,
    seat_of,
    sharpness_of,
    stays,
    weigh_what_stays,
)
from paged.rules import COUNT, DRAWN, ENDS_IN, FROM, IN_PROMPT, MOST_MARKS, MOST_WORD_TOKENS, TOKEN
from paged.sampling import MIN_P, PROMPT, SEED, TEMPERATURE, TOP_K, TOP_P, WORD_TOKENS

_TEMPERATURE, _TOP_P, _MIN_P = map(tl.constexpr, (TEMPERATURE, TOP_P, MIN_P))
_SEED, _TOP_K, _PROMPT, _IN_PROMPT = map(tl.constexpr, (SEED, TOP_K, PROMPT, IN_PROMPT))
_FROM, _COUNT, _MARKS = map(tl.constexpr, (FROM, COUNT, MOST_MARKS))
_TOKEN, _ENDS_IN, _DRAWN = map(tl.constexpr, (TOKEN, ENDS_IN, DRAWN))
_WORD_TOKENS, _WORDS = map(tl.constexpr, (WORD_TOKENS, MOST_WORD_TOKENS))


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
def _weigh_kernel(logits_ptr, seats_ptr, seq_lens_ptr, floats_ptr, integers_ptr, history_ptr,
                  marks_ptr, top_ptr, bottom_ptr, index_ptr, weight_ptr, vocab_size,
                  SLICE: tl.constexpr, EARLY: tl.constexpr):
    # Of one slice of one row: its largest and smallest logit, where the largest stands, and the sum
    # of the weights relative to it.
    start_early(EARLY)
    number = tl.program_id(0)
    row = logits_ptr + number.to(tl.int64) * vocab_size
    seat = seat_of(number,
                   tl.load(seats_ptr + number).to(tl.int64), floats_ptr, integers_ptr, history_ptr,
                   marks_ptr, seq_lens_ptr, vocab_size)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    at = number * tl.num_programs(1) + tl.program_id(1)
    sharpness = sharpness_of(seat[0])
    if has_history(seat[0]):
        logits = logits_of(row, seat, token, vocab_size, True)
        _weigh_slice(logits, top_ptr, bottom_ptr, index_ptr, weight_ptr, at, token, sharpness)
    else:
        logits = logits_of(row, seat, token, vocab_size, False)
        _weigh_slice(logits, top_ptr, bottom_ptr, index_ptr, weight_ptr, at, token, sharpness)


@triton.jit
def _best(top_ptr, at, inside):
    """The largest logit of a row, from its slices; and whether the row is broken."""
    tops = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    best = tl.max(tops, 0)
    broken = (tl.max((tops != tops).to(tl.int32), 0) > 0) | (tl.abs(best) == float("inf"))
    return tops, best, broken


@triton.jit
def _cut_row(row, seat, tops, weights, ties_before, vocab_size, low, best, sharpness, top_k, top_p,
             SLICES: tl.constexpr, SLICE: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
             AMENDED: tl.constexpr):
    level, stay = cut(row, seat, vocab_size, low, best, sharpness, top_k, top_p, LINES, COLUMNS,
                      AMENDED)
    weigh_what_stays(row, seat, tops, weights, ties_before, vocab_size, level, stay, sharpness,
                     SLICES, SLICE, LINES, AMENDED)
    return level, stay


@triton.jit
def _cut_kernel(logits_ptr, seats_ptr, seq_lens_ptr, floats_ptr, integers_ptr, history_ptr,
                marks_ptr, top_ptr, bottom_ptr, weight_ptr, ties_ptr, level_ptr, stay_ptr,
                vocab_size, SLICES: tl.constexpr, PADDED: tl.constexpr, SLICE: tl.constexpr,
                LINES: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    number = tl.program_id(0)
    row = logits_ptr + number.to(tl.int64) * vocab_size
    seat = seat_of(number,
                   tl.load(seats_ptr + number).to(tl.int64), floats_ptr, integers_ptr, history_ptr,
                   marks_ptr, seq_lens_ptr, vocab_size)
    asks, top_k = seat[0], tl.load(seat[1] + _TOP_K)
    top_p, min_p = tl.load(asks + _TOP_P), tl.load(asks + _MIN_P)
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (min_p > 0) | (top_p < 1)
    tl.store(level_ptr + number, float("-inf"))
    if (filtered == 0) | (tl.load(asks + _TEMPERATURE) == 0):
        return
    part = tl.arange(0, PADDED)
    at, inside = number * SLICES + part, part < SLICES
    _, best, broken = _best(top_ptr, at, inside)
    if broken:
        return
    sharpness = sharpness_of(asks)
    low = tl.min(tl.load(bottom_ptr + at, mask=inside, other=float("inf")), 0)
    if min_p > 0:
        low = tl.maximum(low, best + tl.log2(min_p) / sharpness)
    tops, weights = top_ptr + number * SLICES, weight_ptr + number * SLICES
    ties_before = ties_ptr + number * SLICES
    if has_history(asks):  # of a line at once: marks and counts take registers too
        level, stay = _cut_row(row, seat, tops, weights, ties_before, vocab_size, low, best,
                               sharpness, top_k, top_p, SLICES, SLICE, 1, COLUMNS, True)
    else:
        level, stay = _cut_row(row, seat, tops, weights, ties_before, vocab_size, low, best,
                               sharpness, top_k, top_p, SLICES, SLICE, LINES, COLUMNS, False)
    tl.store(level_ptr + number, level)
    tl.store(stay_ptr + number, stay)


@triton.jit
def _mix(x):
    """SplitMix64 (Steele et al., 2014), as in `sampler.uniform`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, place):
    """A multiple of 2⁻²³ in [0, 1): a function of a seed and of a token's place in its text."""
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
                 history_ptr, marks_ptr, words_ptr, top_ptr, index_ptr, weight_ptr, ties_ptr,
                 level_ptr, stay_ptr, tokens_ptr, out_ptr, turn_ptr, vocab_size, out_width,
                 SLICES: tl.constexpr, PADDED: tl.constexpr, SLICE: tl.constexpr,
                 EARLY: tl.constexpr):
    start_early(EARLY)
    number = tl.program_id(0)
    row = logits_ptr + number.to(tl.int64) * vocab_size
    at_seat = tl.load(seats_ptr + number).to(tl.int64)
    seat = seat_of(number, at_seat, floats_ptr, integers_ptr, history_ptr, marks_ptr, seq_lens_ptr,
                   vocab_size)
    asks, integers = seat[0], seat[1]
    part = tl.arange(0, PADDED)
    at, inside = number * SLICES + part, part < SLICES
    tops, best, broken = _best(top_ptr, at, inside)
    index = tl.load(index_ptr + at, mask=inside, other=ANY)
    chosen = tl.min(tl.where(tops == best, index, ANY), 0)
    if (tl.load(asks + _TEMPERATURE) > 0) & (broken == 0):
        sharpness = sharpness_of(asks)
        weights = tl.load(weight_ptr + at, mask=inside, other=0.0)
        weights = tl.where(inside & (tops > float("-inf")),
                           weights * tl.exp2((tops - best) * sharpness), 0.0)
        place = tl.load(seq_lens_ptr + number) - tl.load(integers + _PROMPT)
        threshold = _uniform(tl.load(integers + _SEED), place) * tl.sum(weights, 0)
        slice = _first_above(weights, threshold, part)
        threshold -= tl.sum(tl.where(part < slice, weights, 0.0), 0)
        token = slice * SLICE + tl.arange(0, SLICE)
        if has_history(asks):
            logits = logits_of(row, seat, token, vocab_size, True)
        else:
            logits = logits_of(row, seat, token, vocab_size, False)
        weight = tl.exp2((logits - best) * sharpness)
        level = tl.load(level_ptr + number)
        if level > float("-inf"):
            stay = tl.load(stay_ptr + number)
            if stay == ANY:
                weight = tl.where(logits >= level, weight, 0.0)
            else:
                before = tl.load(ties_ptr + number * SLICES + slice)
                weight = tl.where(stays(logits, level, stay, before, 0), weight, 0.0)
        chosen = _first_above(weight, threshold, token)
    tl.store(out_ptr + tl.load(turn_ptr) * out_width + number, tl.where(broken, -1, chosen))
    if (tl.load(samples_ptr + number) > 0) & (broken == 0):  # else: in the middle of a prompt
        tl.store(tokens_ptr + at_seat, chosen)
        if has_history(asks):
            _remember(seat, words_ptr + at_seat * 3 * _WORDS, chosen)


@triton.jit
def _remember(seat, words, chosen):
    """Enter a token into history, marks and words of its seat."""
    asks, integers, history, marks, length = seat
    seen = tl.load(history + chosen).to(tl.int32)
    number = seen & (_IN_PROMPT - 1)
    if seen < 0:
        count = marks + _COUNT * _MARKS + number
        tl.store(count, tl.load(count) + 1)
    elif number < _IN_PROMPT - 1:
        tl.store(history + chosen, (seen + 1).to(tl.int16))
    num_words = tl.load(integers + _WORD_TOKENS)
    if num_words > 0:
        column = tl.arange(0, _WORDS)
        real = column < num_words
        token = tl.load(words + _TOKEN * _WORDS + column, mask=real, other=0)
        before = tl.load(words + _DRAWN * _WORDS + column - 1, mask=real & (column > 0), other=0)
        now = real & ((token == ~chosen) | ((token == chosen) & (before > 0)))
        tl.debug_barrier()  # all have read what others overwrite
        tl.store(words + _DRAWN * _WORDS + column, now.to(tl.int32), mask=real)
        ends = tl.load(words + _ENDS_IN * _WORDS + column, mask=now, other=0)
        first = marks + _FROM * _MARKS + ends  # mark 0, of no word, is never anyway
        after_next = tl.load(length) - tl.load(integers + _PROMPT) + 2
        now = now & (tl.load(first, mask=now, other=0) < after_next)
        tl.store(first, after_next.to(tl.int32), mask=now)


def sample(logits: torch.Tensor, seats: torch.Tensor, seq_lens: torch.Tensor, samples: torch.Tensor,
           state, out: torch.Tensor, turn: torch.Tensor) -> None:
    """Draw the next token of every row; the largest logit's at temperature 0.

    Args:
        logits: [rows, vocab_size], contiguous. A row with NaN or infinity, or with nothing above
            −infinity, gives −1.
        seats, seq_lens: [rows]; the seat of each row, and the length of its context.
        samples: [rows], 0 for a row whose token does not count.
        state: the `seats.Seats`; the token goes to its tokens[seat] and into its history, marks and
            words.
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
    kept = state.floats, state.integers, state.history, state.marks
    _weigh_kernel[num_rows, slices](logits, seats, seq_lens, *kept, top, bottom, index, weight,
                                    vocab_size, SLICE=slice_size, **early)
    # As many columns as 16 warps load at once, 8 a thread.
    _cut_kernel[
        num_rows,
    ](logits, seats, seq_lens, *kept, top, bottom, weight, ties, level, stay, vocab_size, LINES=4,
      COLUMNS=slice_size, num_warps=16, **shape, **early)
    _draw_kernel[
        num_rows,
    ](logits, seats, seq_lens, samples, *kept, state.words, top, index, weight, ties, level, stay,
      state.tokens, out, turn, vocab_size, out.shape[1], **shape, **early)
