"""Beam search over one prompt, a token at a time, as transformers does it: which beams go on, which
have ended, when no better one can come.

Knows log probabilities and token ids only; who computes them is somebody else's business. Follows
transformers' GenerationMixin._beam_search, so that texts are the same for the same numbers.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Beam:
    """score: the sum of its tokens' log probabilities. entries: of each token."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: Beam
    token_id: int
    score: float
    entry: TokenLogprobs

    def grown(self) -> Beam:
        parent = self.parent
        return Beam((*parent.token_ids, self.token_id), self.score, (*parent.entries, self.entry))


class BeamSearch:
    """live: beams that go on, the best one first; empty when the search is over. num_candidates:
    the likeliest tokens that advance() needs of each."""

    def __init__(
        self, num_beams: int, options: BeamOptions, ending_ids: frozenset[int], max_tokens: int
    ) -> None:
        self.live = [Beam()]
        self.num_candidates = max(2, 1 + len(ending_ids)) * num_beams
        self._num_beams = num_beams
        self._options = options
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ended: list[tuple[float, Beam]] = []

    def advance(self, tops: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """tops: of each live beam, its likeliest next tokens and their log probabilities."""
        candidates = self._candidates(tops)
        self._num_tokens += 1
        penalty = self._num_tokens**self._options.length_penalty
        ends = [self._is_end(candidate) for candidate in candidates]
        pairs = list(zip(candidates, ends, strict=True))
        self._ended += [
            (one.score / penalty, one.grown()) for one, is_end in pairs[: self._num_beams] if is_end
        ]
        # Stable: of equal ones the first to end stays first.
        self._ended = sorted(self._ended, key=lambda one: -one[0])[: self._num_beams]
        going = [one for one, is_end in pairs if not is_end][: self._num_beams]
        self.live = [one.grown() for one in going]
        if self.live and not self._may_improve():
            self.live = []

    def best(self, num: int) -> list[Beam]:
        """Ended beams, the best one first."""
        return [beam for _, beam in self._ended[:num]]

    def _candidates(
        self, tops: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> list[_Candidate]:
        made = [
            _Candidate(
                beam,
                token_id,
                beam.score + logprob,
                TokenLogprobs(logprob, rank, list(token_ids), list(logprobs)),
            )
            for beam, (token_ids, logprobs) in zip(self.live, tops, strict=True)
            for rank, (token_id, logprob) in enumerate(
                zip(token_ids, logprobs, strict=True), start=1
            )
        ]
        return sorted(made, key=lambda one: -one.score)[: self.num_candidates]

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
