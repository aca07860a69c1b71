"""How the next token is chosen, and when a request ends: the parameters. The sampler is in
`sampler.py`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from numbers import Real

from paged.checks import refuses, whole_number

# Where a runner keeps what a seat asks for: columns of its numbers, and of its integers.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
SEED, TOP_K, PROMPT = range(3)
IN_PROMPT = 1 << 14
"""Added to a token's count of appearances in the output, where it is in the prompt too."""

LEFT_OUT = """
    min_tokens logit_bias bad_words allowed_token_ids include_stop_str_in_output
    skip_special_tokens spaces_between_special_tokens detokenize prompt_logprobs
    truncate_prompt_tokens best_of use_beam_search length_penalty early_stopping guided_decoding
    structured_outputs response_format logits_processors priority"""


@refuses("SamplingParams", LEFT_OUT)
@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler.

    Args:
        n: completions of the prompt; they share its blocks.
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest; 0 keeps all.
        repetition_penalty: divide positive and multiply negative logits of tokens already seen, in
            the prompt too; 1 is off.
        presence_penalty: subtract from the logits of tokens already generated; 0 is off.
        frequency_penalty: subtract for each time that a token was generated; 0 is off.
        max_tokens: tokens generated at most.
        stop: a string, or several, that ends the text; it is not part of the text.
        stop_token_ids: token ids that end the request, beside the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        seed: the same seed draws the same tokens, whatever shares the batch.
        logprobs: record the log-probability of each chosen token and of this many likeliest ones.

    Raises ValueError for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self):

        def require(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {allowed}")

        for name, least in (("n", 1), ("top_k", 0), ("max_tokens", 1), ("seed", None), ("logprobs",
                                                                                        0)):
            value = getattr(self, name)
            if value is not None or name not in ("seed", "logprobs"):
                object.__setattr__(self, name, whole_number(name, value, least))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"):
            object.__setattr__(self, name, _finite_number(name, getattr(self, name)))
        require("temperature", self.temperature >= 0, "0 (greedy) or more")
        require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        require("repetition_penalty", self.repetition_penalty > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            require(name, -2 <= getattr(self, name) <= 2, "from -2 to 2")
        strings = isinstance(self.stop, (str, Collection)) or self.stop is None
        require("stop", strings and all(isinstance(s, str) and s for s in self.stop_strings),
                "a string or strings, none empty")
        if self.stop_token_ids is not None:
            require(
                "stop_token_ids", not isinstance(self.stop_token_ids, (str, bytes))
                and isinstance(self.stop_token_ids, Iterable), "integers")
            ids = tuple(
                whole_number("an entry of stop_token_ids", token) for token in self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", ids)
        require("ignore_eos", self.ignore_eos in (True, False), "True or False")

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far change what comes next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they were given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class BeamSearchParams(SamplingParams):
    """What a request asks of beam search: beside these, max_tokens, stop_token_ids and ignore_eos.

    Args:
        beam_width: beams that live on after each token, and completions returned, best first.
        length_penalty: a completion's score is its log-probability divided by its length to this
            power; above 0 it favours long ones.

    Raises ValueError for a value outside its range, and for what only sampling has.
    """

    temperature: float = 0.0
    beam_width: int = 4
    length_penalty: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "beam_width", whole_number("beam_width", self.beam_width, least=1))
        _finite_number("length_penalty", self.length_penalty)
        likeliest = 2 * self.beam_width  # what it asks of the sampler
        for name, *allowed in (("n", 1), ("temperature", 0), ("top_k", 0), ("top_p", 1),
                               ("min_p", 0), ("repetition_penalty", 1), ("presence_penalty", 0),
                               ("frequency_penalty", 0), ("stop", None), ("logprobs", None,
                                                                          likeliest)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: beam search takes the likeliest "
                    f"continuations, leave it at {allowed[0]!r}")
        object.__setattr__(self, "logprobs", likeliest)


def _finite_number(name: str, value) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")
    return float(value)
