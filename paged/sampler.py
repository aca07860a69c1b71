"""Choosing the next token of every row of logits: the specification, in PyTorch.

    logits - penalties -> temperature -> min-p -> top-k -> top-p -> a random number picks the token

A row never reads another row, and its random number is a function of its request's seed and of the
place of the token in its text. So a seed draws the same tokens whatever shares the batch, and a
filter that removes nothing changes nothing. `kernels.sample` does the same on a GPU, without a
sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from paged.seats import Seats

HEAD = 1024  # likeliest tokens looked at before the whole vocabulary is sorted
_MASK = 2**64 - 1


def sample(logits: Tensor, seats: Tensor, seq_lens: Tensor, samples: Tensor, state: Seats,
           out: Tensor, turn: Tensor) -> None:
    """Draw the next token of every row.

    Args:
        logits: [rows, vocab]. A row with NaN or infinity, or with nothing above −infinity, gives
            −1.
        seats, seq_lens: [rows]; the seat of each row, and the length of its context.
        samples: [rows], 0 for a row whose token does not count.
        state: the token goes to its tokens[seat] and into its history.
        out: [turns, at least rows], the token goes to out[turn, row]; turn: [1].
    """
    numbers, integers = state.floats[seats], state.integers[seats]
    tokens = draw(logits.float(), numbers, integers, seq_lens - integers[:, PROMPT],
                  state.history[seats] if _penalized(numbers).any() else None)
    out[turn[0], :len(tokens)] = tokens
    counts = (samples > 0) & (tokens >= 0)
    state.tokens[seats[counts].long()] = tokens[counts].int()
    counts &= _penalized(numbers)
    at, drawn = seats[counts].long(), tokens[counts]
    seen = state.history[at, drawn]
    state.history[at, drawn] = seen + (seen % IN_PROMPT < IN_PROMPT - 1)


def draw(logits: Tensor, numbers: Tensor, integers: Tensor, places: Tensor,
         history: Tensor | None = None) -> Tensor:
    """The chosen tokens [rows] of logits [rows, vocab], float32; −1 for a broken row.

    Args:
        numbers, integers: [rows, columns], the columns of `sampling`.
        places: [rows]; of the token among those that were generated, counted from 0.
        history: [rows, vocab], see `batch.Newcomer`; None where no row has a penalty.
    """
    if history is not None:
        logits = penalize(logits, numbers, history)
    peak, likeliest = logits.max(dim=-1)
    tokens = likeliest
    drawn = (numbers[:, TEMPERATURE] > 0).nonzero()[:, 0]
    if len(drawn):
        numbers, integers, logits = numbers[drawn], integers[drawn], logits[drawn]
        # Relative to the likeliest token, whose weight is 1: no temperature can overflow. Not
        # normalised, since all that follows compares with a share of the total.
        temperature = numbers[:, TEMPERATURE, None].clamp(min=1e-6)
        relative = logits - peak[drawn, None]
        weights = (relative / temperature).exp()
        min_p = numbers[:, MIN_P, None]
        weights = weights.masked_fill((min_p > 0) & (relative < min_p.log() * temperature), 0)
        points = [
            uniform(seed, place)
            for seed, place in zip(integers[:, SEED].tolist(), places[drawn].tolist())
        ]
        kept = keep_likeliest(weights, integers[:, TOP_K], numbers[:, TOP_P])
        picked = _pick(kept, torch.tensor(points, device=logits.device)[:, None])
        tokens = likeliest.index_copy(0, drawn, picked)
    return torch.where(peak.isfinite(), tokens, -1)


def uniform(seed: int, place: int) -> float:
    """A number of [0, 1) for a place in the text of a seed: a multiple of 2^-23 (SplitMix64, Steele
    2014)."""
    mixed = _mix(_mix(seed & _MASK) + place)
    return (mixed >> 41) / 2**23  # coarse enough for u * total < total to hold in float32


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def _penalized(numbers: Tensor) -> Tensor:
    return ((numbers[:, REPETITION] != 1) | (numbers[:, PRESENCE] != 0)
            | (numbers[:, FREQUENCY] != 0))


def penalize(logits: Tensor, numbers: Tensor, history: Tensor) -> Tensor:
    """Logits [rows, vocab] after the repetition penalty (Keskar et al. 2019), which looks at prompt
    and output, and the presence and frequency penalties, which look at the output."""
    repetition = numbers[:, REPETITION, None]
    seen = torch.where(logits > 0, logits / repetition, logits * repetition)
    count = history % IN_PROMPT
    logits = torch.where((history != 0) & (repetition != 1), seen, logits)
    return (logits - numbers[:, FREQUENCY, None] * count - numbers[:, PRESENCE, None] * (count > 0))


def keep_likeliest(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights [rows, vocab] with 0 for what top-k, then top-p among what it left, cut away.

    Of tokens of equal weight the lower id stays first.
    """
    vocab = weights.shape[-1]
    cut = ((0 < top_k) & (top_k < vocab) | (top_p < 1)).nonzero()[:, 0]
    if not len(cut):
        return weights
    rows = weights[cut]
    k = torch.where(top_k[cut] > 0, top_k[cut], vocab)[:, None]
    # A share is reached when rounding alone keeps the sum from it; the whole is never reached.
    share = torch.where(top_p[cut] < 1, top_p[cut] * (1 - 1e-6), 2.0)[:, None]
    total = rows.sum(dim=-1, keepdim=True)
    # Sorting a vocabulary costs ten times what finding its head costs, and the head nearly always
    # holds the answer: it does if all that stays is likelier than the head's last token.
    for size in (min(HEAD, vocab), vocab):
        head, ids = _sorted(rows, size)
        inside = head.masked_fill(torch.arange(size, device=rows.device) >= k, 0)
        reached = inside.cumsum(dim=-1)
        target = share * torch.where(k <= size, reached[:, -1:], total)
        kept = inside.masked_fill(reached - inside >= target, 0)  # while those before fall short
        if ((kept == 0) | (kept > head[:, -1:])).all():
            break
    return weights.index_copy(0, cut, torch.zeros_like(rows).scatter_(1, ids, kept))


def _sorted(weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest weights and their token ids [rows, size], falling; the lower id first among
    equals."""
    if size == weights.shape[-1]:
        return torch.sort(weights, dim=-1, descending=True, stable=True)
    ids = weights.topk(size).indices.sort(dim=-1).values
    head, order = torch.sort(weights.gather(1, ids), dim=-1, descending=True, stable=True)
    return head, ids.gather(1, order)


def _pick(weights: Tensor, points: Tensor) -> Tensor:
    """Where points [rows, 1] of [0, 1) fall if weights [rows, n] are laid end to end: index
    [rows]."""
    ends = weights.cumsum(dim=-1)
    found = torch.searchsorted(ends, points * ends[:, -1:], right=True)[:, 0]
    return found.clamp_(max=weights.shape[-1] - 1)  # a row of NaN is reported by the caller


def logprobs(logits: Tensor, tokens: Tensor, num_likeliest: int) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probabilities, each [rows, 1 + num_likeliest]: of the token drawn,
    and of the likeliest, falling. They are the model's own, before penalties and temperature."""
    scores = logits.float().log_softmax(dim=-1)
    top = scores.topk(min(num_likeliest, scores.shape[-1]))
    ids = torch.cat((tokens.long().clamp(min=0)[:, None], top.indices), dim=1)
    return ids, scores.gather(1, ids)
