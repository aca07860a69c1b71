"""How the next token is chosen, and when a request ends: the parameters. The sampler is in
`sampler.py`."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from numbers import Real

from paged.checks import refuses, whole_number

# Where a runner keeps what a seat asks for: columns of its numbers, and of its integers.
# HAS_HISTORY: penalties or rules change the logits. WORD_TOKENS: so many of bad words are followed.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, HAS_HISTORY = range(7)
SEED, TOP_K, PROMPT, WORD_TOKENS = range(4)

LEFT_OUT = """
    spaces_between_special_tokens detokenize best_of use_beam_search length_penalty early_stopping
    guided_decoding structured_outputs response_format logits_processors priority"""


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
        logit_bias: {token id: number to add to its logit}, before penalties and temperature.
        allowed_token_ids: draw no others; None allows all.
        bad_words: a text, or several, that the output will not hold as the tokens that it has at a
            beginning or after a space.
        min_tokens: tokens before which nothing ends a request: end-of-sequence ids and
            stop_token_ids are not drawn, stop strings not looked for.
        max_tokens: tokens generated at most.
        stop: a string, or several, that ends the text; it is not part of the text.
        stop_token_ids: token ids that end the request, beside the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        include_stop_str_in_output: what ended the text, string or token, is part of it.
        skip_special_tokens: special tokens are no text.
        seed: the same seed draws the same tokens, whatever shares the batch.
        logprobs: record the log-probability of each chosen token and of this many likeliest ones.
        prompt_logprobs: the same for the tokens of the prompt. Such a request computes all of its
            prompt, whatever is cached.
        truncate_prompt_tokens: of a longer prompt, take so many of its last tokens.

    Log-probabilities are the model's own, before all that changes what is drawn. Raises ValueError
    for a value outside its range, in float32 where that computes with it.
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
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: str | list[str] | tuple[str, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self):
        self._check_integers()
        self._check_numbers()
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            strings = value is None or isinstance(value, (str, Collection))
            self._require(name, strings and all(isinstance(s, str) and s for s in _strings(value)),
                          "a string or strings, none empty")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._require(name, getattr(self, name) in (True, False), "True or False")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {allowed}")

    def _check_integers(self) -> None:
        for name, least in (("n", 1), ("top_k", 0), ("max_tokens", 1), ("seed", None),
                            ("logprobs", 0), ("min_tokens", 0), ("prompt_logprobs",
                                                                 0), ("truncate_prompt_tokens", 1)):
            value, optional = getattr(self, name), SamplingParams.__dataclass_fields__[name].default
            if value is not None or optional is not None:
                object.__setattr__(self, name, whole_number(name, value, least))
        self._require("min_tokens", self.min_tokens <= self.max_tokens,
                      f"at most max_tokens, which is {self.max_tokens}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None:
                continue
            self._require(name, not isinstance(value, (str, bytes)) and isinstance(value, Iterable),
                          "integers")
            ids = tuple(whole_number(f"an entry of {name}", token) for token in value)
            object.__setattr__(self, name, ids)
        self._require("allowed_token_ids", self.allowed_token_ids != (), "one token at least")

    def _check_numbers(self) -> None:
        for name, least, most, allowed in (
            ("temperature", 0, inf, "0 (greedy) or more"),
            ("top_p", _SMALLEST, 1, "above 0 and at most 1"),
            ("min_p", 0, 1, "from 0 to 1"),
                # Beyond, a logit could leave float32.
            ("repetition_penalty", 1e-6, 1e6, "from 0.000001 to 1000000"),
            ("presence_penalty", -2, 2, "from -2 to 2"),
            ("frequency_penalty", -2, 2, "from -2 to 2")):
            number = _finite_number(name, getattr(self, name))
            self._require(name, _float32(least) <= _float32(number) <= _float32(most), allowed)
            object.__setattr__(self, name, number)
        if self.logit_bias is not None:
            self._require("logit_bias", isinstance(self.logit_bias, Mapping), "{token id: number}")
            bias = {
                whole_number("a token of logit_bias", token, least=0): _finite_number(
                    f"logit_bias of token {token!r}", value)
                for token, value in self.logit_bias.items()
            }
            object.__setattr__(self, "logit_bias", bias)
            self._require("logit_bias", all(abs(_float32(value)) <= 100 for value in bias.values()),
                          "numbers from -100 to 100 (bad_words and allowed_token_ids rule out)")

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far change what comes next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they were given in."""
        return _strings(self.stop)

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        """The bad words as a tuple, whatever form they were given in."""
        return _strings(self.bad_words)


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
        penalty = _finite_number("length_penalty", self.length_penalty)
        self._require("length_penalty", abs(penalty) <= 10, "from -10 to 10")
        likeliest = 2 * self.beam_width  # what it asks of the sampler
        ours = ("beam_width", "length_penalty", "max_tokens", "stop_token_ids", "ignore_eos",
                "seed", "truncate_prompt_tokens")
        for option in fields(self):
            if option.name not in ours and getattr(self, option.name) not in (
                    option.default, likeliest if option.name == "logprobs" else option.default):
                raise ValueError(
                    f"{option.name} is {getattr(self, option.name)!r}: beam search takes the "
                    f"likeliest continuations, leave it at {option.default!r}")
        object.__setattr__(self, "logprobs", likeliest)


_SMALLEST = 2.0**-149
"""The smallest number above 0 in float32."""


def _strings(value) -> tuple:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _finite_number(name: str, value) -> float:
    try:
        number = float(value) if isinstance(value, Real) and value is not True else inf
    except OverflowError:
        number = inf
    if not isfinite(number):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")
    return number


def _float32(number: float) -> float:
    """The number as float32 has it, infinite beyond its end."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return inf if number > 0 else -inf
