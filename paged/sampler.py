"""Choosing the next token of every request of a batch from its logits.

Everything happens on the device of the logits, and one copy at the end brings the tokens to the
host. A row never reads another row, and the only random number it uses is a function of its
request's seed and of how many tokens the request has generated. So a seeded request draws the same
tokens whatever shares the batch.

    logits - penalty -> temperature -> min-p -> top-k -> top-p -> one uniform number picks the token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HEAD = 1024  # likeliest tokens looked at before the whole vocabulary is sorted
_MASK = 2**64 - 1


def sample(logits: Tensor,
           requests: Sequence[Any]) -> tuple[list[int], list[dict[int, float] | None] | None]:
    """The chosen token of each row of logits [requests, vocab], and log-probabilities where asked
    for.

    A request has .params (SamplingParams), .token_ids (prompt and output), .num_prompt_tokens and
    .seed. The log-probabilities are those of the model itself, before penalty and temperature: of
    the chosen token and of the params.logprobs likeliest ones. logits is not written to. Raises
    ValueError when a row holds NaN or infinity.
    """
    chosen = choose(logits, requests)
    logprobs = _logprobs(logits, requests, chosen)
    tokens = chosen.tolist()
    if -1 in tokens:
        raise ValueError(
            f"Row {tokens.index(-1)} of {len(tokens)} rows of logits holds NaN or infinity: the "
            "weights are damaged, or their dtype is too narrow for this model; try bfloat16 or "
            "float32.")
    return tokens, logprobs


def choose(logits: Tensor, requests: Sequence[Any]) -> Tensor:
    """The chosen tokens [requests], still on the device, of logits [requests, vocab]; -1 for a
    broken row."""
    logits = _penalize(logits, requests)
    peak, likeliest = logits.max(dim=-1)
    tokens = likeliest
    drawn = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        whole = len(drawn) == len(requests)
        rows, top = (logits, peak) if whole else (logits[at], peak[at])
        tokens = likeliest.index_copy(0, at, _draw(rows, top, [requests[i] for i in drawn]))
    return torch.where(peak.isfinite(), tokens, -1)


def uniform(seed: int, step: int) -> float:
    """A number of [0, 1) for the step-th token of a seed: a multiple of 2^-23 (SplitMix64, Steele
    2014)."""
    mixed = _mix(_mix(seed & _MASK) + step)
    return (mixed >> 41) / 2**23  # coarse enough for u * total < total to hold in float32


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def _penalize(logits: Tensor, requests: Sequence[Any]) -> Tensor:
    """Repetition penalty (Keskar et al. 2019): tokens of the prompt and of the output become less
    likely."""
    rows, tokens, penalties = [], [], []
    for i, request in enumerate(requests):
        if request.params.repetition_penalty != 1:
            seen = set(request.token_ids)
            rows += [i] * len(seen)
            tokens += seen
            penalties += [request.params.repetition_penalty] * len(seen)
    if not rows:
        return logits
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    penalty, seen = _column(penalties, logits)[:, 0], logits[where]
    return logits.index_put(where, torch.where(seen > 0, seen / penalty, seen * penalty))


def _draw(logits: Tensor, peak: Tensor, requests: Sequence[Any]) -> Tensor:
    """One token [rows] at random for each row of logits [rows, vocab] with maximum peak [rows]."""
    params, vocab = [request.params for request in requests], logits.shape[-1]
    points = _column([
        uniform(request.seed,
                len(request.token_ids) - request.num_prompt_tokens) for request in requests
    ], logits)
    # Relative to the likeliest token, whose weight is 1: no temperature can overflow. Not
    # normalised, since all that follows compares with a share of the total.
    temperature = _column([max(p.temperature, 1e-6) for p in params], logits)
    weights = ((logits - peak[:, None]) / temperature).exp_()
    if any(p.min_p > 0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits), 0)
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if not cut:
        return _pick(weights, points)
    at = torch.tensor(cut, device=logits.device)
    kept, ids = _likeliest(weights[at], [params[i] for i in cut])
    # Laid end to end by token id, not by weight: two nearly equal weights may change places when
    # other requests share the batch, and the same random number would then fall on the other token.
    if ids.shape[-1] == vocab:
        tokens = _pick(torch.zeros_like(kept).scatter_(1, ids, kept), points[at])
    else:
        ids, order = ids.sort(dim=-1)
        tokens = ids.gather(1, _pick(kept.gather(1, order), points[at])[:, None])[:, 0]
    return tokens if len(cut) == len(params) else _pick(weights, points).index_copy(0, at, tokens)


def _likeliest(weights: Tensor, params: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p among what it left: weights and token ids [rows, n], likeliest first, 0
    where cut."""
    vocab = weights.shape[-1]
    k = torch.tensor([p.top_k or vocab for p in params], device=weights.device)[:, None]
    # A share is reached when rounding alone keeps the sum from it; the whole is never reached.
    share = _column([p.top_p * (1 - 1e-6) if p.top_p < 1 else 2.0 for p in params], weights)
    total = weights.sum(dim=-1, keepdim=True)
    # Sorting a vocabulary costs ten times what finding its head costs, and the head nearly always
    # holds the answer: it does if all that stays is likelier than the head's last token. To look is
    # free on the CPU; on a GPU it would be a wait for the device.
    looks = weights.is_cpu and not any(HEAD < p.top_k < vocab for p in params)
    fits = all(0 < p.top_k <= HEAD for p in params)
    for size in [min(HEAD, vocab), vocab] if looks or fits else [vocab]:
        head, ids = _sorted(weights, size)
        inside = head.masked_fill(torch.arange(size, device=weights.device) >= k, 0)
        reached = inside.cumsum(dim=-1)
        target = share * torch.where(k <= size, reached[:, -1:], total)
        kept = inside.masked_fill(reached - inside >= target,
                                  0)  # it stays while those before it fall short
        if not looks or size == vocab or ((kept == 0) | (kept > head[:, -1:])).all():
            break
    return kept, ids


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


def _logprobs(logits: Tensor, requests: Sequence[Any],
              tokens: Tensor) -> list[dict[int, float] | None] | None:
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if not asked:
        return None
    at = torch.tensor(asked, device=logits.device)
    scores = logits[at].log_softmax(dim=-1)
    chosen = tokens[at].clamp(min=0)[:, None]
    top = scores.topk(min(max(requests[i].params.logprobs for i in asked), scores.shape[-1]))
    ids = torch.cat((chosen, top.indices), dim=1).tolist()
    values = torch.cat((scores.gather(1, chosen), top.values), dim=1).tolist()
    result: list[dict[int, float] | None] = [None] * len(requests)
    for i, row_ids, row_values in zip(asked, ids, values, strict=True):
        keep = 1 + requests[i].params.logprobs
        result[i] = dict(zip(row_ids[:keep], row_values[:keep], strict=True))
    return result


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
