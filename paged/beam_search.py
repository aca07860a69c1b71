"""Beam search: the best continuations of every beam live on, over blocks that all of them share.

A beam is a request that decodes like any other, and waits after each token until all beams of its
prompt have theirs. Then the continuations compete. A beam with several survivors forks; one without
ends; nothing is copied before a shared block is written.

    step    beams                          continuations kept     blocks (size 2)
      1     the                            cat  dog
      2     the cat,  the dog              cat sat,  cat ran      [the cat] is shared by both,
      3     the cat sat,  the cat ran      ...                    [the dog] is free again

So beams hold their common prefix once, and every ending that lost gives its blocks back.

Follows Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 4.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from paged.request import CompletionOutput, Request
from paged.sampling import BeamSearchParams
from paged.scheduler import Scheduler


class BeamSearch:
    """The beams of one prompt.

    Args:
        first: the request with the prompt; its params are BeamSearchParams.

    Attributes:
        live: the requests that are beams now. The engine's own list of the prompt's unfinished
            requests.
        blocks_used, blocks_held: distinct blocks of all beams, and entries of their tables, over
            all steps.
    """

    def __init__(self, first: Request):
        self.params, self.live = cast(BeamSearchParams, first.params), [first]
        self._num_forked = 0
        self.blocks_used = self.blocks_held = 0
        self.restart()

    def restart(self) -> None:
        """Begin again with the prompt: what an interruption left cannot be trusted."""
        del self.live[1:]
        first = self.live[0]
        first.completion.token_ids.clear()
        first.start_over()
        first.num_seats = self.params.beam_width
        self._logprob = {first: 0.0}  # of each live beam
        self._candidates: dict[Request, dict[int, float]] = {}
        self.hypotheses: list[tuple[float, CompletionOutput]] = [
        ]  # finished beams and their scores, best first

    def offer(self, beam: Request, logprobs: dict[int, float] | None) -> bool:
        """Take a beam's likeliest next tokens; True once every beam has offered."""
        if logprobs is None:
            raise ValueError(
                "beam search needs log-probabilities: this runner does not fill batch.logprobs")
        self._candidates[beam] = logprobs
        return len(self._candidates) == len(self.live)

    def advance(self, scheduler: Scheduler) -> bool:
        """Let the best continuations live on, and fork or end the beams; True if the search is
        over.

        Of all continuations the best 2 × beam_width are looked at. Those that end a text become
        hypotheses, and the best beam_width of the others are the beams of the next step.
        """
        params, end = self.params, self.live[0].stop_token_ids
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
        for beam in list(self.live):
            self._continue(beam, [(token, logprob)
                                  for logprob, parent, token in survivors if parent is beam],
                           scheduler)
        self._count_blocks()
        return False

    def completions(self, tokenizer=None) -> list[CompletionOutput]:
        """The best hypotheses, best first; with a tokenizer, as text, too."""
        completions = []
        for index, (_, found) in enumerate(self.hypotheses):
            visible = found.token_ids[:-1] if found.finish_reason == "stop" else found.token_ids
            text = b"" if tokenizer is None else b"".join(map(tokenizer.token_bytes, visible))
            completions.append(replace(found, index=index, text=text.decode(errors="replace")))
        return completions

    def memory_saved(self) -> float:
        """Share of the blocks of all beams that sharing saved, over all steps."""
        return 1 - self.blocks_used / self.blocks_held if self.blocks_held else 0.0

    def _continue(self, beam: Request, tokens: list[tuple[int, float]],
                  scheduler: Scheduler) -> None:
        """The beam itself goes on with the first of its surviving tokens, a fork with each of the
        others."""
        before = list(beam.token_ids)
        beam.num_seats = 1
        del self._logprob[beam]
        for index, (token, logprob) in enumerate(tokens):
            child = beam
            if index > 0:
                self._num_forked += 1
                completion = CompletionOutput(self._num_forked,
                                              token_ids=before[beam.num_prompt_tokens:])
                child = Request(f"{beam.output.request_id}.{self._num_forked}",
                                (beam.order[0], self._num_forked), list(before), beam.params,
                                beam.output, completion, beam.seed, beam.salt, beam.stop_token_ids)
                child.beams = self
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
