"""Measures candidates at one point after another, within a time, and leaves out who cannot.

Whoever measures is handed in. Knows no device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from attention.timing import AttentionPhase
from attention.tuning.points import StepPoint
from attention.tuning.table import LeftOut, TuningTable

logger = logging.getLogger(__name__)

HOPELESS_RATIO = 3.0
_MIN_HOPELESS_POINTS = 4
_MIN_HOPELESS_ROWS = 3
_PROGRESS_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class PointResult:
    """seconds: of all measured layers, by candidate. errors: of candidates that failed."""

    seconds: Mapping[str, float]
    errors: Mapping[str, str]


class MeasurePoint(Protocol):
    def __call__(self, point: StepPoint, names: Sequence[str]) -> PointResult:
        """Time the candidates against each other; every name is in one part of the result."""


def tune(
    table: TuningTable,
    points: Sequence[StepPoint],
    measure: MeasurePoint,
    max_seconds: float,
    clock: Callable[[], float],
    least_contenders: int = 2,
) -> TuningTable:
    """The table with what it lacked at points, in their order. A phase that has fewer than
    least_contenders is not measured: there is nothing to choose.

    After max_seconds the rest is left out, with a warning: no point is begun then. The first
    points, one for each phase, do not count: kernels that this machine never ran are compiled
    there. A candidate that fails, or is HOPELESS_RATIO times slower than the fastest wherever it
    was measured, is left out of the phase, with a line in the log.
    """
    for phase in table.names:
        table = _without_hopeless(table, phase)
    todo = [point for point in points if _is_worth_measuring(table, point, least_contenders)]
    num_phases = len({point.phase for point in todo})
    start_s = told_s = clock()
    for place, point in enumerate(todo):
        now_s = clock()
        if place <= num_phases:
            start_s = now_s
        if now_s - start_s >= max_seconds:
            _tell_of_rest(len(todo) - place, len(todo), max_seconds)
            break
        if now_s - told_s >= _PROGRESS_INTERVAL_S:
            told_s = now_s
            logger.info("measuring attention: %d of %d kinds of steps", place, len(todo))
        if _is_worth_measuring(table, point, least_contenders):
            table = _with_point(table, point, measure)
    return table


def _tell_of_rest(num_left: int, num_points: int, max_seconds: float) -> None:
    logger.warning(
        "attention: %d of %d kinds of steps were not measured in %.1f s: the nearest ones stand "
        "for them; the next start goes on",
        num_left,
        num_points,
        max_seconds,
    )


def _is_worth_measuring(table: TuningTable, point: StepPoint, least_contenders: int) -> bool:
    return len(table.contenders(point.phase)) >= least_contenders and bool(table.missing(point))


def _with_point(table: TuningTable, point: StepPoint, measure: MeasurePoint) -> TuningTable:
    result = measure(point, table.contenders(point.phase))
    table = replace(table, seconds={**table.seconds, point: dict(result.seconds)})
    for name, error in result.errors.items():
        logger.warning("attention backend %s failed at %s and is left out: %s", name, point, error)
        table = _without(table, LeftOut(point.phase, name, f"failed at {point}: {error}"))
    if result.seconds:
        shown = ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in result.seconds.items())
        logger.debug("attention, %s: %s", point, shown)
    return _without_hopeless(table, point.phase)


def _without_hopeless(table: TuningTable, phase: AttentionPhase) -> TuningTable:
    """Those that win nothing anywhere: their timings take the most time."""
    names = table.contenders(phase)
    seen = {
        other: at
        for other, at in table.seconds.items()
        if other.phase is phase and all(name in at for name in names)
    }
    num_rows = len({other.rows for other in seen})
    if len(seen) < _MIN_HOPELESS_POINTS or num_rows < _MIN_HOPELESS_ROWS:
        return table
    for name in names:
        ratio = min(at[name] / min(at[other] for other in names) for at in seen.values())
        if ratio > HOPELESS_RATIO:
            reason = f"at least {ratio:.1f} times slower than the fastest at {len(seen)} points"
            logger.info("attention backend %s is measured no more: %s", name, reason)
            table = _without(table, LeftOut(phase, name, reason))
    return table


def _without(table: TuningTable, one: LeftOut) -> TuningTable:
    return replace(table, left_out=(*table.left_out, one))
