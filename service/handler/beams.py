"""Beam search over one prompt, a token at a time, as transformers does it: which beams go on, which
have ended, when no better one can come.

Knows log probabilities and token ids only; who computes them is somebody else's business. Follows
transformers' GenerationMixin._beam_search, so that texts are the same for the same numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.engine.logprobs import TokenLogprobs

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """early_stopping: True ends with as many ended beams as are wanted; False when the best one
    that goes on is not likely to become better than these, judged at its length; "never" when it
    cannot become better at the longest length. length_penalty: the exponent of the length that a
    beam's log probability is divided by: above 0 for longer ones.
    """

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


Tops = tuple[Sequence[int], Sequence[float]]
"""The likeliest next tokens of a beam and their log probabilities."""


@dataclass(frozen=True, slots=True)
class Beam:
    """score: the sum of its tokens' log probabilities. entries: of each token, with as many others
    as the search is to tell."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: Beam
    token_id: int
    score: float
    logprob: float
    rank: int
    tops: Tops

    def grown(self, num_top: int) -> Beam:
        parent, (token_ids, logprobs) = self.parent, self.tops
        entry = TokenLogprobs(
            self.logprob, self.rank, list(token_ids[:num_top]), list(logprobs[:num_top])
        )
        return Beam((*parent.token_ids, self.token_id), self.score, (*parent.entries, entry))


class BeamSearch:
    """live: beams that go on, the best one first; empty when the search is over. num_candidates:
    the likeliest tokens that advance() needs of each. num_top: how many of them a beam keeps of
    each of its tokens."""

    def __init__(
        self,
        num_beams: int,
        options: BeamOptions,
        ending_ids: frozenset[int],
        max_tokens: int,
        num_top: int,
    ) -> None:
        self.live = [Beam()]
        self.num_candidates = max(2, 1 + len(ending_ids)) * num_beams
        self._num_beams = num_beams
        self._options = options
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._num_top = num_top
        self._num_tokens = 0
        self._ended: list[tuple[float, Beam]] = []

    def advance(self, tops: Sequence[Tops]) -> None:
        """tops: of each live beam."""
        self._num_tokens += 1
        penalty = self._num_tokens**self._options.length_penalty
        going: list[Beam] = []
        for place, one in enumerate(self._candidates(tops)):
            if not self._is_end(one):
                going.append(one.grown(self._num_top))
            elif place < self._num_beams:
                self._ended.append((one.score / penalty, one.grown(self._num_top)))
            if len(going) == self._num_beams <= place + 1:
                break
        # Stable: of equal ones the first to end stays first.
        self._ended = sorted(self._ended, key=lambda one: -one[0])[: self._num_beams]
        self.live = going
        if self.live and not self._may_improve():
            self.live = []

    def best(self, num: int) -> list[Beam]:
        """Ended beams, the best one first."""
        return [beam for _, beam in self._ended[:num]]

    def _candidates(self, tops: Sequence[Tops]) -> Iterator[_Candidate]:
        """The best one first; of equal ones those of better beams, and likelier tokens. Made one by
        one, as few of them are looked at."""
        losses = [
            (-(beam.score + logprob), index, rank)
            for index, (beam, (_, logprobs)) in enumerate(zip(self.live, tops, strict=True))
            for rank, logprob in enumerate(logprobs)
        ]
        for loss, index, rank in sorted(losses)[: self.num_candidates]:
            token_ids, logprobs = tops[index]
            yield _Candidate(
                self.live[index], token_ids[rank], -loss, logprobs[rank], rank + 1, tops[index]
            )

    def _is_end(self, candidate: _Candidate) -> bool:
        return candidate.token_id in self._ending_ids or self._num_tokens >= self._max_tokens

    def _may_improve(self) -> bool:
        if len(self._ended) < self._num_beams:
            return True
        stopping, exponent = self._options.early_stopping, self._options.length_penalty
        if stopping is True:
            return False
        is_patient = stopping == "never" and exponent > 0
        length = self._max_tokens if is_patient else self._num_tokens
        return self.live[0].score / float(length**exponent) > self._ended[-1][0]
