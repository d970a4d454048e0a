"""What measuring led to: candidates, their times, and which of them a step takes. Data only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from attention.forward_batch import ForwardMode
from attention.timing import AttentionPhase, phase_of
from attention.tuning.candidates import AUTO_TUNED, CandidateSet
from attention.tuning.points import MIN_UNEVEN_ROWS, StepPoint, points_between
from attention.tuning.table import LeftOut, TunedChoice, TuningTable

_STEPS_PER_OCTAVE = 4
_PREFIX_OFFSET = 128


@dataclass(frozen=True, slots=True)
class _GraphRows:
    """Of graphs of one size. rows: those of decode steps that count as different ones there: the
    size, and those that were measured and that graphs of half the size do not hold."""

    rows: tuple[int, ...]
    decoders: tuple[str, ...]


@dataclass(frozen=True)
class TunedRoutes:
    """max_context_len: of a request. num_layers: of those that the table's times are of."""

    candidates: CandidateSet
    table: TuningTable
    max_context_len: int
    num_layers: int

    @cached_property
    def chosen(self) -> Mapping[AttentionPhase, tuple[str, ...]]:
        """By phase: who is the fastest at some measured point or between some, the phase's best
        first. No other one is ever taken."""
        return {
            phase: self.table.chosen_names(
                phase, points_between([p for p in self.table.seconds if p.phase is phase])
            )
            for phase in self.candidates.layers
        }

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return (*self.candidates.left_out, *self.table.left_out)

    def choose(self, point: StepPoint) -> TunedChoice:
        phase = point.phase if point.phase in self.chosen else AttentionPhase.EXTEND
        return self.table.choose(point, self.chosen[phase])

    def nearest_rows(self, size: int, num_rows: int) -> int:
        """Whose times stand for a decode step of num_rows in a graph of size rows."""
        inside = self._graph_rows(size).rows
        return min(inside, key=lambda rows: abs(math.log(rows / num_rows)))

    def decoders_of(self, size: int) -> tuple[str, ...]:
        """Of decode steps in graphs of size rows, whatever their rows and lengths; the phase's best
        first."""
        return self._graph_rows(size).decoders

    def _graph_rows(self, size: int) -> _GraphRows:
        if size not in self._known_graph_rows:
            measured = {p.rows for p in self.table.seconds if p.phase is AttentionPhase.DECODE}
            rows = {size, *(rows for rows in measured if size < 2 * rows < 2 * size)}
            taken = {name for one in rows for name in self._decoders_of_rows(one)}
            names = self.chosen[AttentionPhase.DECODE]
            decoders = tuple(name for name in names if name in taken)
            self._known_graph_rows[size] = _GraphRows(tuple(sorted(rows)), decoders)
        return self._known_graph_rows[size]

    def _decoders_of_rows(self, rows: int) -> set[str]:
        kinds = (False, True) if rows >= MIN_UNEVEN_ROWS else (False,)
        lengths = rounded_prefixes(self.max_context_len)
        points = itertools.product((AttentionPhase.DECODE,), (rows,), (1,), lengths, kinds)
        return {self.choose(StepPoint(*place)).name for place in points}

    @cached_property
    def _known_graph_rows(self) -> dict[int, _GraphRows]:
        return {}

    def name_in(self, mode: ForwardMode) -> str:
        phase = phase_of(mode)
        names = self.chosen.get(phase, self.chosen[AttentionPhase.EXTEND])
        return " or ".join(names)

    def __str__(self) -> str:
        extend, decode = self.name_in(ForwardMode.EXTEND), self.name_in(ForwardMode.DECODE)
        if extend == decode:
            return f"{AUTO_TUNED}: {decode}"
        return f"{AUTO_TUNED}: {extend} (prefill), {decode} (decode)"


def rounded_point(point: StepPoint) -> StepPoint:
    """Steps that differ by little, as one."""
    new, prefix = _rounded(point.new_tokens), _prefix(point.prefix_tokens)
    return StepPoint(point.phase, point.rows, new, prefix, point.is_uneven)


def rounded_prefixes(max_tokens: int) -> list[int]:
    """All that rounded_point makes of prefixes below max_tokens, ascending."""
    first = _STEPS_PER_OCTAVE * int(math.log2(_PREFIX_OFFSET))
    last = round(_STEPS_PER_OCTAVE * math.log2(max_tokens + _PREFIX_OFFSET))
    return [_unfolded(step) for step in range(first, last + 1)]


def _prefix(prefix_tokens: int) -> int:
    return _unfolded(round(_STEPS_PER_OCTAVE * math.log2(prefix_tokens + _PREFIX_OFFSET)))


def _unfolded(step: int) -> int:
    return max(0, round(math.exp2(step / _STEPS_PER_OCTAVE)) - _PREFIX_OFFSET)


def _rounded(num_tokens: int) -> int:
    step = round(_STEPS_PER_OCTAVE * math.log2(num_tokens))
    return max(1, round(math.exp2(step / _STEPS_PER_OCTAVE)))
