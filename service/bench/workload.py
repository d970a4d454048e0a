"""What is sent: an endless, seeded sequence of requests, the same for every transport.

Pure. Request i depends on the seed and the shape only, not on the load pattern, the transport or
how many requests follow. Knows no clock and no protocol.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from service.bench.lengths import LengthDistribution

# Syllables as words: one or two tokens each in any vocabulary.
_WORDS = tuple(consonant + vowel for consonant in "bdfghklmnprstv" for vowel in "aeiou")


class RequestStream(IntEnum):
    """Independent sequences of one seed, so that warm-up never fills a cache for what counts."""

    MEASURED = 0
    WARMUP = 1


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """prefix_share: share of each prompt, from its start, that its group has in common, in [0, 1].

    num_prefix_groups: requests are dealt to groups at random, each with its own prefix.
    vocab_size: prompt tokens are uniform over [0, vocab_size).
    """

    input_len: LengthDistribution
    output_len: LengthDistribution
    vocab_size: int
    prefix_share: float = 0.0
    num_prefix_groups: int = 1
    seed: int = 0

    @property
    def max_total_tokens(self) -> int:
        """The longest that a prompt and its output together can be."""
        return self.input_len.max_tokens + self.output_len.max_tokens


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. num_shared_tokens: how many first tokens its prefix group has in common."""

    index: int
    prompt_token_ids: list[int]
    max_tokens: int
    group: int = 0
    num_shared_tokens: int = 0

    def as_words(self) -> str:
        """The prompt as text, for chat: one word a token, equal prefixes for equal prefixes."""
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.prompt_token_ids)


def generate_requests(
    shape: WorkloadShape, stream: RequestStream = RequestStream.MEASURED
) -> Iterator[BenchRequest]:
    """Yield requests without end."""
    lengths, tokens, groups, prefixes = (
        np.random.default_rng(child)
        for child in np.random.SeedSequence([shape.seed, stream]).spawn(4)
    )
    max_shared = int(shape.input_len.max_tokens * shape.prefix_share)
    shared = prefixes.integers(shape.vocab_size, size=(shape.num_prefix_groups, max_shared))
    index = 0
    while True:
        num_input_tokens = shape.input_len.sample(lengths)
        max_tokens = shape.output_len.sample(lengths)
        group = int(groups.integers(shape.num_prefix_groups))
        num_shared = int(num_input_tokens * shape.prefix_share)
        own = tokens.integers(shape.vocab_size, size=num_input_tokens - num_shared)
        prompt = [*shared[group, :num_shared].tolist(), *own.tolist()]
        yield BenchRequest(index, prompt, max_tokens, group, num_shared)
        index += 1
