"""Beam search by brute force: whole sequences, no blocks, no early end; the judge of
paged.beam_search."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence


def brute_force(prompt: Sequence[int], width: int, max_tokens: int, end: Container[int],
                distribution: Callable[[list[int]], dict[int, float]],
                length_penalty: float = 1.0) -> list[tuple[list[int], float]]:
    """The best completions and their log-probabilities, best first.

    In each step the best 2 × width continuations of all beams are looked at: those that end are
    finished, and the best width of the others go on. distribution gives every token's
    log-probability after a sequence.
    """
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        continuations = [(tokens + [token], total + logprob) for tokens, total in beams
                         for token, logprob in distribution(list(prompt) + tokens).items()]
        continuations.sort(key=lambda c: -c[1])
        best = continuations[:2 * width]
        finished += [c for c in best if c[0][-1] in end]
        beams = [c for c in best if c[0][-1] not in end][:width]
    finished += beams
    finished.sort(key=lambda c: -c[1] / len(c[0])**length_penalty)
    return finished[:width]
