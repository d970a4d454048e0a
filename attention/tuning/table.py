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

_NEAR_OCTAVES = 2.0
_NEAR_PREFIX_OCTAVES = 3.0
"""How far from what was measured a step may be to be told by it, in rows and new tokens together,
and in its prefix: of all points_to_measure none is further from each of them."""

_FEWEST_NEW_TOKENS = 4
"""Fewer are as many to a kernel: a part of one tile."""

Plane = tuple[float, float]
"""Octaves of rows and of new tokens."""
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
    """For one step. seconds: of each candidate, of all layers, as measured or interpolated.
    is_near: False where these are of steps unlike this one, and do not count."""

    name: str
    seconds: Mapping[str, float]
    is_near: bool = True

    def reason(self, num_layers: int) -> str:
        """The times of one of so many layers."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])
        shown = (f"{name} {seconds / num_layers * 1e6:.1f} us" for name, seconds in times)
        far = "" if self.is_near else " at the nearest step, too far to count"
        return ", ".join(shown) + far


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
        """For a step like point; names: those that come into question, None for all contenders.
        Where nothing was measured near it of its own kind, even steps tell of it; where there are
        none of these either, the phase's best is taken."""
        phase = point.phase if point.phase in self.names else AttentionPhase.EXTEND
        allowed = self.contenders(phase) if names is None else tuple(names)
        kinds = dict.fromkeys((point.is_uneven, False))
        known = [self._surfaces[phase, kind] for kind in kinds if (phase, kind) in self._surfaces]
        if not known:
            return TunedChoice(self._best[phase] if names is None else allowed[0], {})
        surface = next((one for one in known if one.is_near(point)), known[0])
        seconds = surface.at(point, allowed)
        fastest = min(allowed, key=seconds.__getitem__)
        usual, is_near = self._best[phase], surface.is_near(point)
        if usual not in allowed:
            return TunedChoice(fastest, seconds, is_near)
        has_won = is_near and seconds[fastest] < (1.0 - MIN_GAIN) * seconds[usual]
        return TunedChoice(fastest if has_won else usual, seconds, is_near)

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

    def _complete(self, phase: AttentionPhase) -> PhaseTimes:
        """Points that every contender was measured at."""
        return {
            point: at
            for point, at in self.seconds.items()
            if point.phase is phase and not self.missing(point)
        }


class _Surface:
    """Times over rows, new tokens and prefixes. Each pair of rows and new tokens has a line of the
    prefixes that it was measured at; a grid of lines, of which some may be missing."""

    def __init__(self, seconds: PhaseTimes) -> None:
        self._lines: dict[Plane, dict[float, Mapping[str, float]]] = {}
        for point, at in seconds.items():
            plane, prefix = _place(point)
            self._lines.setdefault(plane, {})[prefix] = at
        self._axes = [sorted(set(axis)) for axis in zip(*self._lines, strict=True)]
        self._prefixes = {plane: sorted(line) for plane, line in self._lines.items()}

    def at(self, point: StepPoint, names: Sequence[str]) -> dict[str, float]:
        where, prefix = _place(point)
        logs = dict.fromkeys(names, 0.0)
        for plane, weight in self._weights(where).items():
            for known, share in _bracket(self._prefixes[plane], prefix):
                at = self._lines[plane][known]
                for name in names:
                    logs[name] += weight * share * math.log(at[name])
        return {name: math.exp(log) for name, log in logs.items()}

    def is_near(self, point: StepPoint) -> bool:
        """Whether what at tells of the point was measured at some like it, or around it."""
        where, prefix = _place(point)
        corners = self._corners(where)
        is_around = _is_whole(corners) and not any(
            _beyond(axis, value) for axis, value in zip(self._axes, where, strict=True)
        )
        near = [
            plane
            for plane in self._weights(where)
            if is_around or math.dist(plane, where) <= _NEAR_OCTAVES
        ]
        gaps = (_beyond(self._prefixes[plane], prefix) for plane in near)
        return min(gaps, default=math.inf) <= _NEAR_PREFIX_OCTAVES

    def _weights(self, where: Plane) -> dict[Plane, float]:
        """Of measured lines, 1 together: what corners that were not measured would weigh has the
        nearest line."""
        weights = self._corners(where)
        if not _is_whole(weights):
            nearest = min(self._lines, key=lambda plane: math.dist(plane, where))
            missing = 1.0 - sum(weights.values())
            weights[nearest] = weights.get(nearest, 0.0) + missing
        return weights

    def _corners(self, where: Plane) -> dict[Plane, float]:
        """The weights of the measured lines around a place."""
        brackets = [_bracket(axis, value) for axis, value in zip(self._axes, where, strict=True)]
        found = {(a, b): wa * wb for (a, wa), (b, wb) in itertools.product(*brackets)}
        return {at: weight for at, weight in found.items() if weight > 0.0 and at in self._lines}


def _is_whole(weights: Mapping[Plane, float]) -> bool:
    return math.isclose(sum(weights.values()), 1.0)


def octaves(point: StepPoint) -> tuple[float, float, float]:
    """Of rows, new tokens and prefix: as far apart as steps are unlike."""
    new_tokens = max(point.new_tokens, _FEWEST_NEW_TOKENS)
    prefix = point.prefix_tokens + _PREFIX_OFFSET
    return math.log2(point.rows), math.log2(new_tokens), math.log2(prefix)


def _place(point: StepPoint) -> tuple[Plane, float]:
    rows, new_tokens, prefix = octaves(point)
    return (rows, new_tokens), prefix


def _bracket(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The places of the axis on both sides, weighted; beyond its ends the end alone."""
    if value <= axis[0]:
        return [(axis[0], 1.0)]
    for low, high in itertools.pairwise(axis):
        if value <= high:
            share = (value - low) / (high - low)
            return [(low, 1.0 - share), (high, share)]
    return [(axis[-1], 1.0)]


def _beyond(axis: Sequence[float], value: float) -> float:
    """How far a value lies from the nearest end of an axis, 0 of one between them."""
    return max(axis[0] - value, value - axis[-1], 0.0)
