"""People who talk to a fleet: conversations that come at random, share system prompts and grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from paged.prefix_cache import default_chain

VOCABULARY = 50_000


@dataclass(frozen=True)
class Load:
    """A stated arrival process.

    Conversations come one by one at random times (Poisson). Each begins with one of the system
    prompts, the k-th being 1/k times as popular as the first (Zipf). Its next turn comes some time
    after the answer to the last, with all that was said before it.

    Args:
        rate: conversations that come in a second.
        seconds: for which they come.
        system_prompts, system_tokens: their number, and the range of their lengths.
        turns: mean turns of a conversation, geometric.
        user_tokens, answer_tokens: ranges of what a turn adds.
        pause: mean seconds between an answer and the next turn, exponential.
        longest: tokens at which a conversation ends.
        seed: of everything drawn. What a conversation says does not depend on the rate.
    """

    rate: float
    seconds: float = 3.0
    system_prompts: int = 30
    system_tokens: tuple[int, int] = (1000, 3000)
    turns: float = 4.0
    user_tokens: tuple[int, int] = (50, 350)
    answer_tokens: tuple[int, int] = (8, 48)
    pause: float = 0.3
    longest: int = 8000
    seed: int = 0


@dataclass
class Turn:
    """What one request asks, known beforehand; `pause` seconds lie before it."""

    user_tokens: int
    answer_tokens: int
    pause: float


@dataclass
class Conversation:
    """One conversation.

    Attributes:
        number: in order of arrival.
        token_ids: all that was said, the next request's prompt.
        hashes: of its full blocks, chained: what a router that knows no tokens can look at.
        turns: those still to come.
        said: turns until now.
    """

    number: int
    arrival: float
    token_ids: list[int]
    turns: list[Turn]
    rng: random.Random
    block_size: int
    hashes: list[int] = field(default_factory=list)
    said: int = 0

    def ask(self) -> Turn:
        """The next turn; its words are now part of the prompt."""
        turn = self.turns.pop(0)
        self.said += 1
        self._say([self.rng.randrange(VOCABULARY) for _ in range(turn.user_tokens)])
        return turn

    def hear(self, answer: list[int]) -> None:
        """The answer becomes part of what was said."""
        self._say(answer)

    def _say(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        for start in range(
                len(self.hashes) * self.block_size,
                len(self.token_ids) - self.block_size + 1, self.block_size):
            parent = self.hashes[-1] if self.hashes else None
            self.hashes.append(CHAIN(parent, self.token_ids[start:start + self.block_size]))


CHAIN: Callable = default_chain()


def system_prompts(load: Load) -> list[list[int]]:
    """What conversations begin with, the most popular first."""
    rng = random.Random(f"prompts {load.seed}")
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*load.system_tokens))]
            for _ in range(load.system_prompts)]


def conversations(load: Load, block_size: int) -> list[Conversation]:
    """All of them, in order of arrival."""
    systems = system_prompts(load)
    weights = [1 / rank for rank in range(1, load.system_prompts + 1)]
    arrivals, now, found = random.Random(f"arrivals {load.seed}"), 0.0, []
    while (now := now + arrivals.expovariate(load.rate)) < load.seconds:
        own = random.Random(f"conversation {load.seed} {len(found)}")
        (system,) = own.choices(systems, weights)
        found.append(
            Conversation(len(found), now, list(system), _turns(load, len(system), own), own,
                         block_size))
    return found


def _turns(load: Load, length: int, rng: random.Random) -> list[Turn]:
    turns = []
    while not turns or rng.random() < 1 - 1 / load.turns:
        turn = Turn(rng.randint(*load.user_tokens), rng.randint(*load.answer_tokens),
                    rng.expovariate(1 / load.pause))
        length += turn.user_tokens + turn.answer_tokens
        if turns and length > load.longest:
            break
        turns.append(turn)
    return turns
