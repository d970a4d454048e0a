"""Token lengths of a workload: fixed, uniform or lognormal, and how they are written on a flag.

Pure: draws come from the generator that is passed in. Knows no requests and no text.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

FORMS = "N, uniform:MIN:MAX or lognormal:MEDIAN:SIGMA:MAX"


class LengthSpecError(ValueError):
    """A length flag that cannot be understood or met. The message names the flag's text."""


class LengthDistribution(Protocol):
    """Lengths in tokens, always in [1, max_tokens]."""

    @property
    def max_tokens(self) -> int: ...

    def sample(self, rng: np.random.Generator) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Every length is num_tokens."""

    num_tokens: int

    @property
    def max_tokens(self) -> int:
        return self.num_tokens

    def sample(self, rng: np.random.Generator) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Integers from min_tokens to max_tokens, both included."""

    min_tokens: int
    max_tokens: int

    def sample(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.min_tokens, self.max_tokens, endpoint=True))


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """exp(Normal(ln median_tokens, sigma)), rounded and clipped to [1, max_tokens].

    The shape of lengths in real chat traffic: a few long ones carry much of the load.
    """

    median_tokens: int
    sigma: float
    max_tokens: int

    def sample(self, rng: np.random.Generator) -> int:
        draw = rng.lognormal(math.log(self.median_tokens), self.sigma)
        return int(min(max(round(min(draw, self.max_tokens)), 1), self.max_tokens))


def parse_length(text: str) -> LengthDistribution:
    """Read a flag such as "128" or "uniform:64:256". Raises LengthSpecError."""
    kind, *values = text.split(":")
    try:
        match kind, values:
            case _, []:
                return _checked(text, FixedLength(int(kind)), int(kind))
            case "uniform", [low, high]:
                return _checked(text, UniformLength(int(low), int(high)), int(low))
            case "lognormal", [median, sigma, high]:
                return _checked_lognormal(text, int(median), float(sigma), int(high))
    except ValueError as error:
        if isinstance(error, LengthSpecError):
            raise
        raise LengthSpecError(f"{text!r} holds something that is no number; use {FORMS}") from error
    raise LengthSpecError(f"{text!r} is not a length; use {FORMS}")


def _checked(text: str, lengths: LengthDistribution, low: int) -> LengthDistribution:
    if not 1 <= low <= lengths.max_tokens:
        raise LengthSpecError(f"{text!r} must satisfy 1 <= shortest <= longest")
    return lengths


def _checked_lognormal(text: str, median: int, sigma: float, high: int) -> LengthDistribution:
    if not (math.isfinite(sigma) and sigma > 0):
        raise LengthSpecError(f"{text!r} must have a sigma above 0")
    return _checked(text, LognormalLength(median, sigma, high), median)
