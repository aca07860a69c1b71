"""Beam search: the best continuations of every beam live on, over blocks that all of them share.

A beam is a request that decodes like any other, and waits after each token until all beams of its
prompt have theirs. Then the continuations compete. A beam with several survivors forks; one without
ends; nothing is copied before a shared block is written.

    step        beams                          continuations kept          blocks (size 2)
      1         the                            cat  dog
      2         the cat,  the dog              cat sat,  cat ran           [the cat] is shared,
      3         the cat sat,  the cat ran      ...                         [the dog] is free again

So beams hold their common prefix once, and every ending that lost gives its blocks back.

Follows Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 4.4.
"""

from __future__ import annotations

import time
from dataclasses import replace

from paged.completions import Group
from paged.request import CompletionOutput, Request, RequestOutput
from paged.sampling import BeamSearchParams
from paged.scheduler import Scheduler


class BeamSearch(Group):
    """The beams of one prompt.

    Args:
        output, order, salt, stop_token_ids, tokenizer: as for `completions.Completions`.
        params: the user's.

    Attributes:
        live: the requests that are beams now.
        hypotheses: finished beams and their scores, best first.
        blocks_used, blocks_held: distinct blocks of all beams, and entries of their tables, over
            all steps.
    """

    params: BeamSearchParams

    def __init__(self, output: RequestOutput, params: BeamSearchParams, order: int,
                 salt: str | None, stop_token_ids: frozenset[int], tokenizer=None):
        super().__init__(output, params)
        self.stop_token_ids, self.tokenizer = stop_token_ids, tokenizer
        output.outputs.append(CompletionOutput(0))
        first = Request(output.request_id, (order, 0), list(output.prompt_token_ids), params,
                        output, output.outputs[0], 0, salt)
        first.group, first.waits = self, True
        self.live.append(first)
        self._num_forked = self.blocks_used = self.blocks_held = 0
        self._begin()

    def restart(self, scheduler: Scheduler) -> None:
        """Begin again with the prompt: what an interruption left cannot be trusted."""
        del self.live[1:]
        if self.live:
            self._begin()
        super().restart(scheduler)

    def _begin(self) -> None:
        first = self.live[0]
        first.completion.token_ids.clear()
        first.num_seats = self.params.beam_width
        self._logprob = {first: 0.0}  # of each live beam
        self._candidates: dict[Request, dict[int, float]] = {}
        self.hypotheses: list[tuple[float, CompletionOutput]] = []

    def take(self, request: Request, token: int, logprobs: dict[int, float] | None,
             scheduler: Scheduler) -> None:
        """Take what a beam offers; once all have, the best continuations go on, or the search
        ends."""
        request.token_ids.pop()  # the likeliest token is only one of the candidates
        output = self.output
        if output.metrics.first_token_time is None:
            output.metrics.first_token_time = time.perf_counter()
        if logprobs is None:
            raise ValueError("beam search needs log-probabilities: this runner gives none")
        self._candidates[request] = logprobs
        if len(self._candidates) < len(self.live) or not self.advance(scheduler):
            return
        output.outputs = self.completions()
        lengths = [len(completion.token_ids) for completion in output.outputs]
        output.metrics.memory_saved = self.memory_saved()
        output.metrics.num_output_tokens = sum(lengths)
        output.metrics.longest_output = max(lengths)
        for beam in list(self.live):
            self.finish(beam, "length", scheduler)

    def abort(self, scheduler: Scheduler) -> None:
        self._show_beams()
        super().abort(scheduler)

    def fail(self, request: Request, error: str, scheduler: Scheduler) -> None:
        self._show_beams()
        super().fail(request, error, scheduler)

    def _show_beams(self) -> None:
        """What there is when the search does not come to its end: the beams, likeliest first."""
        beams = sorted(self.live, key=lambda beam: -self._logprob.get(beam, 0.0))
        self.output.outputs = [beam.completion for beam in beams]
        for index, beam in enumerate(beams):
            completion = beam.completion
            completion.index, completion.cumulative_logprob = index, self._logprob.get(beam, 0.0)
            completion.text = self._text(completion.token_ids)

    def advance(self, scheduler: Scheduler) -> bool:
        """Let the best continuations live on, and fork or end the beams; True if the search is
        over.

        Of all continuations the best 2 × beam_width are looked at. Those that end a text become
        hypotheses, and the best beam_width of the others are the beams of the next step.
        """
        params, end = self.params, self.stop_token_ids
        ranked = sorted(((self._logprob[beam] + logprob, beam, token)
                         for beam, candidates in self._candidates.items()
                         for token, logprob in candidates.items()), key=lambda c:
                        (-c[0], c[1].order, c[2]))
        self._candidates = {}
        survivors = []
        for logprob, beam, token in ranked[:2 * params.beam_width]:
            if token in end:
                self._set_aside(beam, token, logprob, "stop")
            elif len(survivors) < params.beam_width:
                survivors.append((logprob, beam, token))
        length = len(self.live[0].completion.token_ids) + 1
        if length == params.max_tokens:
            for logprob, beam, token in survivors:
                self._set_aside(beam, token, logprob, "length")
            return True
        if not survivors or self._decided(survivors[0][0], length):
            return True
        tokens: dict[Request, list[tuple[int, float]]] = {beam: [] for beam in self.live}
        for logprob, beam, token in survivors:
            tokens[beam].append((token, logprob))
        for beam in sorted(self.live,
                           key=lambda beam: len(tokens[beam])):  # losers give their seats
            self._continue(beam, tokens[beam], scheduler)
        for beam in self.live:
            beam.num_seats = 1
        self.live[0].num_seats += params.beam_width - len(self.live)  # kept for beams to come
        self._count_blocks()
        return False

    def completions(self) -> list[CompletionOutput]:
        """The best hypotheses, best first; with a tokenizer, as text, too."""
        return [
            replace(
                found, index=index, text=self._text(found.token_ids[:-1] if found.finish_reason ==
                                                    "stop" else found.token_ids))
            for index, (_, found) in enumerate(self.hypotheses)
        ]

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self.tokenizer
        text = b"" if tokenizer is None else b"".join(map(tokenizer.token_bytes, token_ids))
        return text.decode(errors="replace")

    def memory_saved(self) -> float:
        """Share of the blocks of all beams that sharing saved, over all steps."""
        return 1 - self.blocks_used / self.blocks_held if self.blocks_held else 0.0

    def _continue(self, beam: Request, tokens: list[tuple[int, float]],
                  scheduler: Scheduler) -> None:
        """The beam itself goes on with the first of its surviving tokens, a fork with each of the
        others."""
        before = list(beam.token_ids)
        del self._logprob[beam]
        for index, (token, logprob) in enumerate(tokens):
            child = beam
            if index > 0:
                self._num_forked += 1
                completion = CompletionOutput(self._num_forked,
                                              token_ids=before[beam.num_prompt_tokens:])
                child = Request(f"{self.output.request_id}.{self._num_forked}",
                                (beam.order[0], self._num_forked), list(before), beam.params,
                                self.output, completion, beam.seed, beam.salt)
                child.group, child.waits = self, True
                self.live.append(child)
            child.token_ids.append(token)
            child.completion.token_ids.append(token)
            self._logprob[child] = logprob
            if index > 0:
                scheduler.fork(beam, child)
        if not tokens:
            self.live.remove(beam)
            scheduler.finish(beam)

    def _set_aside(self, beam: Request, token: int, logprob: float, reason: str) -> None:
        token_ids = [*beam.completion.token_ids, token]
        score = logprob / len(token_ids)**self.params.length_penalty
        completion = CompletionOutput(0, token_ids=token_ids, finish_reason=reason,
                                      stop_reason=token if reason == "stop" else None,
                                      cumulative_logprob=logprob)
        self.hypotheses.append((score, completion))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis[0])
        del self.hypotheses[self.params.beam_width:]

    def _decided(self, best_logprob: float, length: int) -> bool:
        """Whether no beam, the best of this length included, can come to a better score than the
        hypotheses.

        A log-probability only falls, and dividing by a greater length can only raise a negative
        score.
        """
        if len(self.hypotheses) < self.params.beam_width:
            return False
        penalty = self.params.length_penalty
        longest = self.params.max_tokens if penalty > 0 else length + 1
        return best_logprob / longest**penalty <= self.hypotheses[-1][0]

    def _count_blocks(self) -> None:
        tables = [beam.block_table for beam in self.live]
        self.blocks_held += sum(map(len, tables))
        self.blocks_used += len({block for table in tables for block in table})
