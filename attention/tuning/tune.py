"""Measures candidates at one point after another, within a time, and leaves out who cannot.

Whoever measures is handed in. Knows no device.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from attention.timing import AttentionPhase
from attention.tuning.agenda import Agenda
from attention.tuning.points import StepPoint
from attention.tuning.table import LeftOut, TuningTable
from attention.tuning.time_limit import TimeLimit

logger = logging.getLogger(__name__)

HOPELESS_RATIO = 3.0
_MIN_HOPELESS_POINTS = 4
_MIN_ROW_COUNTS = 3
_MIN_TWIN_POINTS = 8
_TWIN_SHARE = 0.9
_TWIN_DEVIATION = 0.015
_TWIN_MEDIAN_DEVIATION = 0.005
"""Two backends that launch the same kernel differed by less than both on an H200 (0.9 and 0.3 % of
26 decode steps), but where something else disturbed them."""
_PROGRESS_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class PointResult:
    """seconds: of all measured layers, by candidate. errors: of candidates that failed.
    compiling_s: what first runs took that compiled kernels."""

    seconds: Mapping[str, float]
    errors: Mapping[str, str]
    compiling_s: float = 0.0


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
    """The table with what it lacked at points, in the order of Agenda. A phase that has fewer than
    least_contenders is not measured: there is nothing to choose.

    After max_seconds the rest is left out, with a warning: no point is begun then. The first
    points, one for each phase, do not count, and of the others compiling as in TimeLimit: kernels
    that this machine never ran are compiled there. A candidate that fails, or is HOPELESS_RATIO
    times slower than the fastest wherever it was measured, is left out of the phase, with a line in
    the log; so is one that takes as long as another one, which then stands for it unless it fails.
    What lies between two lengths at which the same one clearly wins is not measured.
    """
    for phase in table.names:
        table = _narrowed(table, phase)
    todo = [point for point in points if _is_worth_measuring(table, point, least_contenders)]
    agenda = Agenda(todo)
    limit, told_s = TimeLimit(max_seconds, clock), clock()
    for place in range(len(todo)):
        now_s = clock()
        if place <= len(agenda.phases):
            limit.start_over()
        if limit.is_over:
            left = [p for p in agenda.left if _is_worth_measuring(table, p, least_contenders)]
            _tell_of_rest(len(left), len(todo), max_seconds)
            break
        if now_s - told_s >= _PROGRESS_INTERVAL_S:
            told_s = now_s
            logger.info("measuring attention: %d of %d kinds of steps", place, len(todo))
        point = agenda.take(table)
        if _is_worth_measuring(table, point, least_contenders):
            result = measure(point, table.contenders(point.phase))
            limit.add(point.phase, clock() - now_s, result.compiling_s)
            table = _with_result(table, point, result)
    if limit.num_points:
        logger.info("attention: %s", limit)
    return table


def _tell_of_rest(num_left: int, num_points: int, max_seconds: float) -> None:
    if not num_left:
        return
    logger.warning(
        "attention: %d of %d kinds of steps were not measured in %.1f s: the ones around stand for "
        "them, or their phase's fastest where there are none; the next start goes on",
        num_left,
        num_points,
        max_seconds,
    )


def _is_worth_measuring(table: TuningTable, point: StepPoint, least_contenders: int) -> bool:
    return (
        len(table.contenders(point.phase)) >= least_contenders
        and bool(table.missing(point))
        and not table.is_settled(point)
    )


def _with_result(table: TuningTable, point: StepPoint, result: PointResult) -> TuningTable:
    table = replace(table, seconds={**table.seconds, point: dict(result.seconds)})
    for name, error in result.errors.items():
        logger.warning("attention backend %s failed at %s and is left out: %s", name, point, error)
        table = _without(table, LeftOut(point.phase, name, f"failed at {point}: {error}"))
        table = _without_stand_in(table, point.phase, name)
    if result.seconds:
        shown = ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in result.seconds.items())
        logger.debug("attention, %s: %s", point, shown)
    return _narrowed(table, point.phase)


def _narrowed(table: TuningTable, phase: AttentionPhase) -> TuningTable:
    """Until no more are left out: the fewer contenders, the more points that all have a time at."""
    narrower = _without_twins(_without_hopeless(table, phase), phase)
    return table if narrower is table else _narrowed(narrower, phase)


def _seen(table: TuningTable, phase: AttentionPhase, least: int) -> list[Mapping[str, float]]:
    """The times at all points that every contender was measured at; none where they are fewer than
    least, or of few numbers of rows: those say nothing of others."""
    names = table.contenders(phase)
    seen = {
        point: at
        for point, at in table.seconds.items()
        if point.phase is phase and all(name in at for name in names)
    }
    is_enough = len(seen) >= least and len({point.rows for point in seen}) >= _MIN_ROW_COUNTS
    return list(seen.values()) if is_enough else []


def _without_hopeless(table: TuningTable, phase: AttentionPhase) -> TuningTable:
    """Those that win nothing anywhere: their timings take the most time."""
    names = table.contenders(phase)
    seen = _seen(table, phase, _MIN_HOPELESS_POINTS)
    for name in names if seen else ():
        ratio = min(at[name] / min(at[other] for other in names) for at in seen)
        if ratio > HOPELESS_RATIO:
            reason = f"at least {ratio:.1f} times slower than the fastest at {len(seen)} points"
            logger.info("attention backend %s is measured no more: %s", name, reason)
            table = _without(table, LeftOut(phase, name, reason))
    return table


def _without_twins(table: TuningTable, phase: AttentionPhase) -> TuningTable:
    """Those that launch what one before them in the order launches: they would win by chance, ask
    for graphs of their own and take as much of the time for measuring."""
    seen = _seen(table, phase, _MIN_TWIN_POINTS)
    kept: list[str] = []
    for name in table.contenders(phase) if seen else ():
        first = next((one for one in kept if _are_twins(one, name, seen)), "")
        if first:
            reason = f"takes as long as {first}, which stands for it"
            logger.info("attention backend %s in %s: %s", name, phase, reason)
            table = _without(table, LeftOut(phase, name, reason, first))
        else:
            kept.append(name)
    return table


def _are_twins(one: str, other: str, seen: Sequence[Mapping[str, float]]) -> bool:
    deviations = [abs(at[one] / at[other] - 1.0) for at in seen]
    num_near = sum(deviation <= _TWIN_DEVIATION for deviation in deviations)
    return (
        num_near >= _TWIN_SHARE * len(seen)
        and statistics.median(deviations) <= _TWIN_MEDIAN_DEVIATION
    )


def _without_stand_in(table: TuningTable, phase: AttentionPhase, name: str) -> TuningTable:
    """Those that name stood for come into question again: whether they fail, too, is not known."""
    kept = tuple(one for one in table.left_out if (one.phase, one.stand_in) != (phase, name))
    return replace(table, left_out=kept)


def _without(table: TuningTable, one: LeftOut) -> TuningTable:
    return replace(table, left_out=(*table.left_out, one))
