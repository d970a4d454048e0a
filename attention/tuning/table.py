"""Measured times of attention and what follows from them: the fastest backend for any step.

Between measured points times are interpolated, by powers, as attention grows. Data only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from attention.timing import AttentionPhase
from attention.tuning.points import StepPoint

MIN_GAIN = 0.005
"""What another backend than the phase's best has to win: less is within what timings vary by, and
each further one of decode steps asks for graphs of its own."""
SETTLED_GAIN = 0.1
"""By how much the same candidate wins at two lengths where none between them is in doubt."""
_SETTLED_SPAN = 5.0
"""The longer of these to the shorter, at most."""
_PREFIX_OFFSET = 128
"""Keys below which a longer prefix changes little."""

Coordinates = tuple[float, float, float]
PhaseTimes = Mapping[StepPoint, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A candidate that is not taken in a phase, and why. stand_in: the one that takes as long as it
    everywhere and is taken in its place; "" of one that is slower or cannot."""

    phase: AttentionPhase
    name: str
    reason: str
    stand_in: str = ""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """For one step. seconds: of each candidate, of all layers, as measured or interpolated."""

    name: str
    seconds: Mapping[str, float]

    @property
    def reason(self) -> str:
        times = sorted(self.seconds.items(), key=lambda item: item[1])
        return ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in times)


@dataclass(frozen=True)
class TuningTable:
    """seconds: by point and by candidate, of the attention of all measured layers together.
    names: by phase the candidates, in the order of preference. left_out: of these."""

    names: Mapping[AttentionPhase, tuple[str, ...]]
    seconds: PhaseTimes = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()

    def contenders(self, phase: AttentionPhase) -> tuple[str, ...]:
        out = {one.name for one in self.left_out if one.phase is phase}
        return tuple(name for name in self.names[phase] if name not in out)

    def missing(self, point: StepPoint) -> tuple[str, ...]:
        """Contenders without a time there."""
        known = self.seconds.get(point, {})
        return tuple(name for name in self.contenders(point.phase) if name not in known)

    def is_settled(self, point: StepPoint) -> bool:
        """Whether the same candidate wins by SETTLED_GAIN at the next shorter and the next longer
        measured prefix of such steps. Between rows nothing is settled by its neighbours: a row more
        can fill the multiprocessors a second time."""
        alike = {
            other.prefix_tokens: other
            for other in self._complete(point.phase)
            if replace(other, prefix_tokens=point.prefix_tokens) == point
        }
        shorter = [prefix for prefix in alike if prefix < point.prefix_tokens]
        longer = [prefix for prefix in alike if prefix > point.prefix_tokens]
        if not (shorter and longer):
            return False
        low, high = max(shorter), min(longer)
        if high + _PREFIX_OFFSET > _SETTLED_SPAN * (low + _PREFIX_OFFSET):
            return False
        winners = {self._clear_winner(alike[at]) for at in (low, high)}
        return len(winners) == 1 and "" not in winners

    def _clear_winner(self, point: StepPoint) -> str:
        """Who wins there by SETTLED_GAIN; "" where nobody does."""
        at = self.seconds[point]
        first, *others = sorted(self.contenders(point.phase), key=at.__getitem__)
        is_clear = all(at[first] <= (1.0 - SETTLED_GAIN) * at[other] for other in others)
        return first if is_clear else ""

    def best(self, phase: AttentionPhase) -> str:
        """Of a phase as a whole: the least mean of logarithms over its points; where nothing was
        measured the first in the order. ValueError where there is no contender."""
        names = self.contenders(phase)
        if not names:
            raise ValueError(f"no candidate for {phase}")
        measured = self._complete(phase)
        return min(names, key=lambda name: sum(math.log(at[name]) for at in measured.values()))

    def choose(self, point: StepPoint, names: Sequence[str] | None = None) -> TunedChoice:
        """For a step like point; names: those that come into question, None for all contenders."""
        phase = point.phase if point.phase in self.names else AttentionPhase.EXTEND
        allowed = self.contenders(phase) if names is None else tuple(names)
        surface = self._surface(phase, point.is_uneven)
        if surface is None:
            return TunedChoice(self._best[phase] if names is None else allowed[0], {})
        seconds = surface.at(point, allowed)
        fastest = min(allowed, key=seconds.__getitem__)
        usual = self._best[phase]
        if usual in allowed and seconds[fastest] >= (1.0 - MIN_GAIN) * seconds[usual]:
            return TunedChoice(usual, seconds)
        return TunedChoice(fastest, seconds)

    def chosen_names(self, phase: AttentionPhase, points: Iterable[StepPoint]) -> tuple[str, ...]:
        """Each once, the phase's best first."""
        others = (self.choose(point).name for point in points)
        return tuple(dict.fromkeys((self._best[phase], *others)))

    @cached_property
    def _best(self) -> dict[AttentionPhase, str]:
        return {phase: self.best(phase) for phase in self.names}

    @cached_property
    def _surfaces(self) -> dict[tuple[AttentionPhase, bool], _Surface]:
        surfaces = {}
        for phase, is_uneven in itertools.product(self.names, (False, True)):
            complete = self._complete(phase)
            own = {point: at for point, at in complete.items() if point.is_uneven == is_uneven}
            if own:
                surfaces[phase, is_uneven] = _Surface(own)
        return surfaces

    def _surface(self, phase: AttentionPhase, is_uneven: bool) -> _Surface | None:
        """Where no such steps were measured, that of even ones."""
        return self._surfaces.get((phase, is_uneven)) or self._surfaces.get((phase, False))

    def _complete(self, phase: AttentionPhase) -> PhaseTimes:
        """Points that every contender was measured at."""
        return {
            point: at
            for point, at in self.seconds.items()
            if point.phase is phase and not self.missing(point)
        }


class _Surface:
    """Times over rows, new tokens and prefixes, on a grid whose corners may be missing."""

    def __init__(self, seconds: PhaseTimes) -> None:
        self._seconds = {_coordinates(point): at for point, at in seconds.items()}
        self._axes = [sorted(set(axis)) for axis in zip(*self._seconds, strict=True)]

    def at(self, point: StepPoint, names: Sequence[str]) -> dict[str, float]:
        where = _coordinates(point)
        weights = self._weights(where)
        total = sum(weights.values())
        return {
            name: math.exp(
                sum(w * math.log(self._seconds[at][name]) for at, w in weights.items()) / total
            )
            for name in names
        }

    def _weights(self, where: Coordinates) -> dict[Coordinates, float]:
        """Of the measured corners around a place; of the nearest point where there is none."""
        brackets = [_bracket(axis, value) for axis, value in zip(self._axes, where, strict=True)]
        weights: dict[Coordinates, float] = {}
        for (a, wa), (b, wb), (c, wc) in itertools.product(*brackets):
            weight = wa * wb * wc
            if weight > 0.0 and (a, b, c) in self._seconds:
                weights[a, b, c] = weight
        return weights or {min(self._seconds, key=lambda at: math.dist(at, where)): 1.0}


def _coordinates(point: StepPoint) -> Coordinates:
    prefix = math.log2(point.prefix_tokens + _PREFIX_OFFSET)
    return math.log2(point.rows), math.log2(point.new_tokens), prefix


def _bracket(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The places of the axis on both sides, weighted; beyond its ends the end alone."""
    if value <= axis[0]:
        return [(axis[0], 1.0)]
    for low, high in itertools.pairwise(axis):
        if value <= high:
            share = (value - low) / (high - low)
            return [(low, 1.0 - share), (high, share)]
    return [(axis[-1], 1.0)]
