"""What becomes of the tokens of a request: text, log-probabilities, its end.

The engine computes tokens for sequences. Which sequences a user's request consists of, and what a
new token means to them, is decided here, by the request's group. A group asks the scheduler to fork
and to finish sequences, and knows nothing of steps or of the model.

    Completions     n sequences that draw their tokens, each for itself
    BeamSearch      the likeliest sequences, which compete (`beam_search.py`)
"""

from __future__ import annotations

import time

from paged.detokenizer import Detokenizer
from paged.request import CompletionOutput, Request, RequestOutput
from paged.rules import Rules
from paged.sampling import SamplingParams
from paged.scheduler import Scheduler


class Group:
    """The unfinished sequences of one user's request.

    Attributes:
        output: what the user sees.
        params: what the user asked.
        live: the sequences; none is left when the request has ended.
    """

    def __init__(self, output: RequestOutput, params: SamplingParams):
        self.output, self.params = output, params
        self.live: list[Request] = []

    def take(self, request: Request, token: int, logprobs: dict[int, float] | None,
             scheduler: Scheduler) -> None:
        """A step has computed `token` for a sequence, and entered it as its last one."""
        raise NotImplementedError

    def scheduled(self) -> list[Request]:
        """The sequences that the scheduler has; others may wait for one of them."""
        return self.live

    def restart(self, scheduler: Scheduler) -> None:
        """A step has failed, and nothing that was computed is there any more: schedule again what
        is unfinished."""
        self._finish_if_none_is_left()
        for request in self.scheduled():
            request.start_over()
            scheduler.add(request)

    def finish(self, request: Request, reason: str, scheduler: Scheduler,
               error: str | None = None) -> None:
        """End one sequence."""
        request.completion.finish_reason, request.completion.error = reason, error
        self.live.remove(request)
        self._finish_if_none_is_left()
        scheduler.finish(request)

    def _finish_if_none_is_left(self) -> None:
        if not self.live:
            self.output.finished = True
            self.output.metrics.finish_time = time.perf_counter()

    def fail(self, request: Request, error: str, scheduler: Scheduler) -> None:
        """A sequence cannot go on; those that depend on it end as well."""
        for failed in list(self.live) if request.waits else [request]:
            self.finish(failed, "error", scheduler, error)

    def abort(self, scheduler: Scheduler) -> None:
        """End all of them."""
        for request in list(self.live):
            self.finish(request, "abort", scheduler)


class Completions(Group):
    """The n completions of one prompt: the first computes it, and the others fork from there.

    Args:
        output: with one CompletionOutput a completion.
        params: the user's.
        order: arrival number of the request.
        seed: of the first completion; the others take the numbers that follow.
        salt: see `Engine.add_request`.
        stop_token_ids: tokens that end a completion.
        tokenizer: has `token_bytes`; None gives no text.
        rules: of what is drawn, or None.
    """

    def __init__(self, output: RequestOutput, params: SamplingParams, order: int, seed: int,
                 salt: str | None, stop_token_ids: frozenset[int], tokenizer=None,
                 rules: Rules | None = None):
        super().__init__(output, params)
        self.stop_token_ids, self.tokenizer = stop_token_ids, tokenizer
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._detokenizers: dict[Request, Detokenizer] = {}
        for number in range(params.n):
            completion = CompletionOutput(number)
            completion.logprobs = None if params.logprobs is None else []
            name = output.request_id + (f".{number}" if number else "")
            request = Request(name, (order, number), list(output.prompt_token_ids), params, output,
                              completion, seed + number, salt, rules)
            request.group = self
            output.outputs.append(completion)
            self.live.append(request)
            if tokenizer is not None:
                self._detokenizers[request] = self._detokenizer()
        self.live[0].waits = params.n > 1

    def take(self, request: Request, token: int, logprobs: dict[int, float] | None,
             scheduler: Scheduler) -> None:
        if request.num_seats > 1:
            self._fork(request, scheduler)
        completion, metrics = request.completion, self.output.metrics
        # What may fail comes first, and a token that has been entered stays: see `restart`.
        text = self._text(request, token, len(completion.token_ids) + 1)
        if completion.logprobs is not None and logprobs is not None:
            completion.logprobs.append(logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0) + logprobs[token]
        completion.token_ids.append(token)
        self._show(completion, text)
        metrics.num_output_tokens += 1
        metrics.longest_output = max(metrics.longest_output, len(completion.token_ids))
        if metrics.first_token_time is None:
            metrics.first_token_time = time.perf_counter()
        self._finish_if_complete(request, scheduler)

    def scheduled(self) -> list[Request]:
        waits = self.live and self.live[0].waits
        return self.live[:1] if waits else self.live

    def restart(self, scheduler: Scheduler) -> None:
        if self.live and not self.live[0].waits:
            for request in self.live:
                request.num_seats = 1  # forked or not, each goes on by itself
        for request in self.live:
            self._derive(request)
        super().restart(scheduler)
        for request in list(self.live):  # some may have been on their way out
            self._finish_if_complete(request, scheduler)

    def _derive(self, request: Request) -> None:
        """Make again of a completion's tokens all that is made of them: the step may have failed
        between the two."""
        completion = request.completion
        tokens, logprobs = completion.token_ids, completion.logprobs
        self.output.metrics.num_output_tokens = sum(len(c.token_ids) for c in self.output.outputs)
        if logprobs:
            del logprobs[len(tokens):]
            completion.cumulative_logprob = sum(map(dict.__getitem__, logprobs, tokens))
        if request in self._detokenizers:
            self._detokenizers[request] = self._detokenizer()
            completion.text = "".join(
                self._text(request, token, number) for number, token in enumerate(tokens, 1))

    def finish(self, request: Request, reason: str, scheduler: Scheduler,
               error: str | None = None) -> None:
        if request in self._detokenizers and reason in ("abort", "error"):
            self._show(request.completion, self._detokenizers[request].finish())
        super().finish(request, reason, scheduler, error)

    def _fork(self, parent: Request, scheduler: Scheduler) -> None:
        """The prompt is computed: let the other completions run over its blocks."""
        parent.num_seats, parent.waits = 1, False
        for child in self.live:
            if child is not parent:
                child.num_seats = 1
                scheduler.fork(parent, child)

    def _detokenizer(self) -> Detokenizer:
        params = self.params
        return Detokenizer(self.tokenizer, params.stop_strings, params.include_stop_str_in_output,
                           params.skip_special_tokens)

    def _stops(self, token: int, number: int) -> bool:
        """Whether a completion's token of this number ends it."""
        return token in self.stop_token_ids and number > self.params.min_tokens

    def _text(self, request: Request, token: int, number: int) -> str:
        """The text that a completion's token of this number makes certain; at the end, all that
        was held back."""
        if not self._detokenizers:
            return ""
        detokenizer = self._detokenizers[request]
        stopped, text = self._stops(token, number), ""
        if not stopped or self.params.include_stop_str_in_output:
            text = detokenizer.push(token, may_stop=not stopped and number > self.params.min_tokens)
        if stopped or number == self.params.max_tokens:
            text += detokenizer.finish()
        return text

    @staticmethod
    def _show(completion: CompletionOutput, text: str) -> None:
        completion.new_text += text
        completion.text += text

    def _finish_if_complete(self, request: Request, scheduler: Scheduler) -> None:
        tokens, detokenizer = request.completion.token_ids, self._detokenizers.get(request)
        if not tokens:
            return
        matched = detokenizer.matched if detokenizer else None
        if self._stops(tokens[-1], len(tokens)) or matched is not None:
            request.completion.stop_reason = tokens[-1] if matched is None else matched
            self.finish(request, "stop", scheduler)
        elif len(tokens) == self.params.max_tokens:
            self.finish(request, "length", scheduler)
