"""Whether two greedy texts differ only where the reference itself is undecided. Pure logic.

Two engines that round differently part where two tokens are nearly as likely, and say other things
from there on. Only the first difference of a text says anything: it comes from the same prefix.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two texts of one prompt part. position counts generated tokens."""

    prompt_index: int
    position: int
    our_token: int
    their_token: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A first difference by the reference's logits after the common prefix.

    best_logit: of any token. bound: how far below it bf16 noise may let a token win.
    """

    difference: FirstDifference
    our_logit: float
    their_logit: float
    best_logit: float
    bound: float

    @property
    def gap(self) -> float:
        return abs(self.our_logit - self.their_logit)

    @property
    def is_near_tie(self) -> bool:
        return self.best_logit - min(self.our_logit, self.their_logit) <= self.bound


def first_differences(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> list[FirstDifference]:
    """One entry for each text that differs. Raises ValueError for texts of different lengths."""
    found = []
    for index, (our_text, their_text) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(our_text, their_text, strict=True))
        parted = next(((at, a, b) for at, (a, b) in pairs if a != b), None)
        if parted is not None:
            found.append(FirstDifference(index, *parted))
    return found


def share_equal(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> float:
    """1 for no texts at all."""
    return 1.0 - len(first_differences(ours, theirs)) / max(len(ours), 1)


def cut_prompts(
    documents: Sequence[Tokens], lengths: Sequence[int], number: int
) -> list[list[int]]:
    """Pieces of documents, their lengths in turn. Seeded.

    Raises ValueError if no document is as long as the longest piece.
    """
    rng = random.Random(0)
    prompts = []
    for index in range(number):
        length = lengths[index % len(lengths)]
        long_enough = [document for document in documents if len(document) >= length]
        if not long_enough:
            raise ValueError(f"no document has {length} tokens")
        document = rng.choice(long_enough)
        start = rng.randrange(len(document) - length + 1)
        prompts.append([*document[start : start + length]])
    return prompts
