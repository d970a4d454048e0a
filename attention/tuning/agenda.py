"""Which step is measured next: time may run out before all are.

Knows points and a table's times; measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import cycle

from attention.timing import AttentionPhase
from attention.tuning.points import StepPoint
from attention.tuning.table import TuningTable, octaves

NUM_FIRST = 12
"""Of a phase's points, measured in their own order: coarse ones say something of all."""
_LEAST_DOUBT = 0.02
"""A share of the time: what wins by less may be wrong as well, and costs little."""
_OCTAVES_BETWEEN_KINDS = 4.0


class Agenda:
    """Points that are left, phases by turns. Behind the first of a phase comes the one that is the
    furthest from what was measured, for how clearly its choice is decided by that."""

    def __init__(self, points: Iterable[StepPoint]) -> None:
        self._left: dict[AttentionPhase, list[StepPoint]] = {}
        for point in points:
            self._left.setdefault(point.phase, []).append(point)
        self._turns: Iterator[AttentionPhase] = cycle(self._left)
        self._num_taken = dict.fromkeys(self._left, 0)
        self._gaps = dict.fromkeys(self.left, math.inf)
        self._known: set[StepPoint] = set()

    @property
    def left(self) -> list[StepPoint]:
        return [point for points in self._left.values() for point in points]

    @property
    def phases(self) -> tuple[AttentionPhase, ...]:
        return tuple(self._left)

    def take(self, table: TuningTable) -> StepPoint:
        """The next one, which is left no more. IndexError where none is left."""
        if not any(self._left.values()):
            raise IndexError("nothing is left to measure")
        phase = next(phase for phase in self._turns if self._left[phase])
        points, num_taken = self._left[phase], self._num_taken[phase]
        self._num_taken[phase] += 1
        if num_taken < NUM_FIRST:
            return points.pop(0)
        self._close_gaps(table)
        urgent = max(points, key=lambda point: self._gaps[point] / _margin(table, point))
        points.remove(urgent)
        return urgent

    def _close_gaps(self, table: TuningTable) -> None:
        """By what was measured since the last time."""
        new = [point for point in table.seconds if point not in self._known]
        self._known.update(new)
        for point in self.left:
            gaps = (_octaves_between(point, other) for other in new if other.phase is point.phase)
            self._gaps[point] = min(self._gaps[point], min(gaps, default=math.inf))


def _margin(table: TuningTable, point: StepPoint) -> float:
    """By which share the second is slower than the first; where nothing near tells, none is."""
    if len(table.contenders(point.phase)) < 2:
        return _LEAST_DOUBT
    chosen = table.choose(point)
    if not (chosen.is_near and chosen.seconds):
        return _LEAST_DOUBT
    first, second, *_ = sorted(chosen.seconds.values())
    return _LEAST_DOUBT + second / first - 1.0


def _octaves_between(one: StepPoint, other: StepPoint) -> float:
    kinds = _OCTAVES_BETWEEN_KINDS if one.is_uneven != other.is_uneven else 0.0
    return math.hypot(math.dist(octaves(one), octaves(other)), kinds)
