"""Traffic for the routing benchmark: who asks what when, as token ids drawn from one seed.

Knows no policy and no replica. A conversation is one or more turns; a turn's prompt is everything
said before it, the answers included, and new tokens. Times are simulated seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Turn:
    """new_token_ids follow everything said before. think_s: wait before asking, after the answer
    before it (of the first turn: 0)."""

    new_token_ids: list[int]
    num_output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """arrival_s: when the first turn is asked."""

    arrival_s: float
    turns: list[Turn]


class Traffic(Protocol):
    """One kind of traffic. The same seed gives the same conversations to every policy."""

    def conversations(self, seed: int, duration_s: float) -> Iterator[Conversation]:
        """In order of arrival, none later than duration_s."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Single questions behind one of num_prefixes long instructions; popularity falls as
    1 / rank ** skew."""

    requests_per_s: float
    skew: float = 1.4
    num_prefixes: int = 256
    prefix_tokens: int = 2048
    question_tokens: tuple[int, int] = (64, 512)
    output_tokens: tuple[int, int] = (16, 160)

    def conversations(self, seed: int, duration_s: float) -> Iterator[Conversation]:
        rng = np.random.default_rng(seed)
        prefixes = [_tokens(rng, self.prefix_tokens) for _ in range(self.num_prefixes)]
        weights = np.arange(1, self.num_prefixes + 1) ** -self.skew
        weights /= weights.sum()
        for arrival_s in _arrivals(rng, self.requests_per_s, duration_s):
            prefix = prefixes[rng.choice(self.num_prefixes, p=weights)]
            question = _tokens(rng, rng.integers(*self.question_tokens))
            outputs = int(rng.integers(*self.output_tokens))
            yield Conversation(arrival_s, [Turn(prefix + question, outputs, 0.0)])


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations of several turns with pauses; all begin with the same short instruction."""

    conversations_per_s: float
    instruction_tokens: int = 512
    num_turns: tuple[int, int] = (2, 9)
    first_tokens: tuple[int, int] = (64, 1024)
    question_tokens: tuple[int, int] = (32, 384)
    output_tokens: tuple[int, int] = (32, 192)
    mean_think_s: float = 4.0

    def conversations(self, seed: int, duration_s: float) -> Iterator[Conversation]:
        rng = np.random.default_rng(seed)
        instruction = _tokens(rng, self.instruction_tokens)
        for arrival_s in _arrivals(rng, self.conversations_per_s, duration_s):
            first = instruction + _tokens(rng, rng.integers(*self.first_tokens))
            turns = [Turn(first, int(rng.integers(*self.output_tokens)), 0.0)]
            for _ in range(int(rng.integers(*self.num_turns)) - 1):
                question = _tokens(rng, rng.integers(*self.question_tokens))
                outputs = int(rng.integers(*self.output_tokens))
                turns.append(Turn(question, outputs, rng.exponential(self.mean_think_s)))
            yield Conversation(arrival_s, turns)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Single prompts that share nothing, of very different lengths."""

    requests_per_s: float
    prompt_tokens: tuple[int, int] = (128, 4096)
    output_tokens: tuple[int, int] = (16, 256)

    def conversations(self, seed: int, duration_s: float) -> Iterator[Conversation]:
        rng = np.random.default_rng(seed)
        for arrival_s in _arrivals(rng, self.requests_per_s, duration_s):
            prompt = _tokens(rng, rng.integers(*self.prompt_tokens))
            yield Conversation(
                arrival_s, [Turn(prompt, int(rng.integers(*self.output_tokens)), 0.0)]
            )


def _arrivals(rng: np.random.Generator, per_s: float, duration_s: float) -> Iterator[float]:
    """A Poisson process."""
    now_s = float(rng.exponential(1 / per_s))
    while now_s < duration_s:
        yield now_s
        now_s += float(rng.exponential(1 / per_s))


def _tokens(rng: np.random.Generator, count: int | np.signedinteger) -> list[int]:
    tokens: list[int] = rng.integers(1, VOCAB_SIZE, size=count).tolist()
    return tokens
