"""Choosing the next token of every row of logits: the specification, in PyTorch.

    logits, rules, penalties -> temperature -> min-p -> top-k -> top-p -> a random number picks one

A row never reads another row, and its random number is a function of its request's seed and of the
place of the token in its text. So a seed draws the same tokens whatever shares the batch, and a
filter that removes nothing changes nothing. `kernels.sample` does the same on a GPU, without a
sort.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged.rules import COUNT, FROM, IN_PROMPT
from paged.sampling import (
    FREQUENCY,
    HAS_HISTORY,
    MIN_P,
    PRESENCE,
    PROMPT,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORD_TOKENS,
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
        state: the token goes to its tokens[seat] and into its history, marks and words.
        out: [turns, at least rows], the token goes to out[turn, row]; turn: [1].
    """
    numbers, integers = state.floats[seats], state.integers[seats]
    places = seq_lens - integers[:, PROMPT]
    logits, changed = logits.float(), numbers[:, HAS_HISTORY] > 0
    if changed.any():
        logits = logits.clone()
        who = seats[changed]
        logits[changed] = amend(logits[changed], numbers[changed], places[changed],
                                state.history[who], state.marks[who])
    tokens = draw(logits, numbers, integers, places)
    out[turn[0], :len(tokens)] = tokens
    counts = (samples > 0) & (tokens >= 0)
    state.tokens[seats[counts].long()] = tokens[counts].int()
    counts &= changed
    _remember(state, seats[counts].long(), tokens[counts].long(), places[counts])


def _remember(state: Seats, seats: Tensor, tokens: Tensor, places: Tensor) -> None:
    """Enter the tokens drawn at some places into histories, marks and words."""
    seen = state.history[seats, tokens]
    counted = (seen >= 0) & (seen % IN_PROMPT < IN_PROMPT - 1)
    state.history[seats, tokens] = seen + counted
    state.marks[seats, COUNT, (seen % IN_PROMPT).where(seen < 0, 0).long()] += (seen < 0).int()
    for seat, token, place in zip(seats.tolist(), tokens.tolist(), places.tolist()):
        if length := int(state.integers[seat, WORD_TOKENS]):
            of_word, ends, drawn = state.words[seat, :, :length]
            before = F.pad(drawn[:-1], (1, 0)) > 0
            now = (of_word == ~token) | (of_word == token) & before
            drawn.copy_(now)
            first = state.marks[seat, FROM]
            ending = ends[now].long()  # mark 0, of no word, is never anyway
            first[ending] = first[ending].clamp(min=place + 2)


def draw(logits: Tensor, numbers: Tensor, integers: Tensor, places: Tensor) -> Tensor:
    """The chosen tokens [rows] of logits [rows, vocab], float32; −1 for a broken row.

    Args:
        numbers, integers: [rows, columns], the columns of `sampling`.
        places: [rows]; of the token among those that were generated, counted from 0.
    """
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


def amend(logits: Tensor, numbers: Tensor, places: Tensor, history: Tensor,
          marks: Tensor) -> Tensor:
    """Logits [rows, vocab] after the rules, and after the repetition penalty (Keskar et al. 2019),
    which looks at prompt and output, and the presence and frequency penalties, which look at the
    output.

    Args:
        numbers, places: as for `draw`.
        history: [rows, vocab], see `batch.Newcomer`.
        marks: [rows, 3, columns], see `rules`.
    """
    marked, number = history < 0, (history % IN_PROMPT).long()
    bias, first, count = (row.gather(1, number.where(marked, 0)) for row in marks.unbind(1))
    logits = logits + bias.view(torch.float32).where(marked, 0)
    logits = logits.masked_fill(marked & (places[:, None] < first), float("-inf"))
    count = count.where(marked, number)
    repetition = numbers[:, REPETITION, None]
    seen = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((count > 0) | (history & IN_PROMPT > 0), seen, logits)
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
