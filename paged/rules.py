"""What a request rules out, and what it favours: tokens with a mark.

    allowed_token_ids    all others never
    bad_words            a token never; of several, the last one behind the others
    min_tokens           what ends the text not before a place in it
    logit_bias           a number added to a token's logit

One idea serves all four. A mark holds a number to add, and the place in the text from which its
token may be drawn; mark 0 is for tokens that may never be. A runner keeps the marks of a request
with its seat, so that a step looks at them where it draws, and waits for nobody. A bad word of
several tokens is followed while it is drawn, token by token, and when only its last one is missing,
that one's mark moves to the place after the next:

    bad word  5 7 9        drawn  … 5     … 5 7     … 5 7 | the next one is not 9

Nothing of it is looked at for requests that ask for none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged.sampling import SamplingParams

IN_PROMPT = 1 << 14
"""Added to a token's count of appearances in the output, where it is in the prompt too."""
MARKED = -(1 << 15)
"""A token's history is this plus the number of its mark, where it has one; plus IN_PROMPT."""
NEVER = 2**31 - 1
"""A place that no text reaches."""
# Rows of a seat's marks; the first is a float32 by its bits.
BIAS, FROM, COUNT = range(3)
# Rows of a seat's words, a column a token: the token, ~token where a word begins; the mark of the
# word's last token in the column before it, else 0; and whether the word is drawn up to here.
TOKEN, ENDS_IN, DRAWN = range(3)
MOST_MARKS, MOST_WORD_TOKENS = 1024, 1024


@dataclass
class Rules:
    """What a request's text may consist of.

    Attributes:
        marks: (bias, first place) of each; that of number 0 is never.
        numbers: of the tokens that have a mark, its number.
        allowed: if not None, the tokens that may be drawn at all.
        words: bad words of several tokens: all but the last token, and the number of its mark.
    """

    marks: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, NEVER)])
    numbers: dict[int, int] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    words: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def columns(self, output: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """The words as a seat keeps them after this output, and the marks that end one now."""
        columns: list[list[int]] = []
        ending = []
        for word, number in self.words:
            for length in range(1, len(word) + 1):
                drawn = tuple(output[-length:]) == word[:length]
                token, last = word[length - 1], length == len(word)
                columns.append([~token if length == 1 else token, number if last else 0, drawn])
                if last and drawn:
                    ending.append(number)
        return columns, ending


def make_rules(params: SamplingParams, ends: Iterable[int],
               bad_words: Sequence[Sequence[int]] = ()) -> Rules | None:
    """The rules of a request, None where it has none.

    Args:
        params: what it asks.
        ends: tokens that end its text, its own and the model's.
        bad_words: `params.bad_words` in tokens.

    Raises ValueError for more rules than a seat has room for, and where no token is left.
    """
    bias, ends = dict(params.logit_bias or {}), set(ends) if params.min_tokens else set()
    words = [tuple(word) for word in bad_words if len(word) > 1]
    never = {word[0] for word in bad_words if len(word) == 1}
    rules = Rules(numbers=dict.fromkeys(never, 0))
    if params.allowed_token_ids is not None:
        rules.allowed = frozenset(params.allowed_token_ids)
        if rules.allowed <= ends | never:
            raise ValueError(
                f"allowed_token_ids leaves {len(rules.allowed)} tokens, and min_tokens="
                f"{params.min_tokens} and bad_words rule them out: allow more")
    for token in [*bias, *ends, *(word[-1] for word in words)]:
        if token not in rules.numbers and (rules.allowed is None or token in rules.allowed):
            rules.numbers[token] = len(rules.marks)
            rules.marks.append((bias.get(token, 0.0), params.min_tokens if token in ends else 0))
    rules.words = [(word[:-1], rules.numbers[word[-1]]) for word in words
                   if rules.numbers.get(word[-1])]  # not if its last token is out anyway
    for what, count, most in (("tokens of logit_bias, bad_words and stop_token_ids", len(
            rules.marks), MOST_MARKS), ("tokens in bad_words",
                                        sum(len(word)
                                            for word, _ in rules.words), MOST_WORD_TOKENS)):
        if count > most:
            raise ValueError(f"{count} {what} are more than the {most} that an engine keeps of a "
                             f"request: give fewer")
    return rules if rules.numbers or rules.allowed is not None else None


def bad_word_tokens(params: SamplingParams, tokenizer) -> list[list[int]]:
    """The tokens of each bad word as a text may hold it: at a beginning, and after a space where
    that is as many other tokens (as in vLLM).

    Raises ValueError for a word without tokens.
    """
    found = []
    for word in params.bad_word_strings:
        bare, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False)
                        for space in ("", " "))
        if not bare:
            raise ValueError(f"bad_words holds {word!r}, which has no tokens: leave it away")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return found
