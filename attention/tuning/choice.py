"""What measuring led to: candidates, their times, and which of them a step takes. Data only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from attention.forward_batch import ForwardMode
from attention.timing import AttentionPhase, phase_of
from attention.tuning.candidates import AUTO_TUNED, CandidateSet
from attention.tuning.points import MIN_UNEVEN_ROWS, StepPoint
from attention.tuning.table import LeftOut, TunedChoice, TuningTable

_STEPS_PER_OCTAVE = 4
_PREFIX_OFFSET = 128


@dataclass(frozen=True)
class TunedRoutes:
    """max_context_len: of a request. num_layers: of those that the table's times are of."""

    candidates: CandidateSet
    table: TuningTable
    max_context_len: int
    num_layers: int

    @cached_property
    def chosen(self) -> Mapping[AttentionPhase, tuple[str, ...]]:
        """By phase: who is the fastest at some measured point, the phase's best first. No other one
        is ever taken."""
        measured = self.table.seconds
        return {
            phase: self.table.chosen_names(phase, (p for p in measured if p.phase is phase))
            for phase in self.candidates.layers
        }

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return (*self.candidates.left_out, *self.table.left_out)

    def choose(self, point: StepPoint) -> TunedChoice:
        phase = point.phase if point.phase in self.chosen else AttentionPhase.EXTEND
        return self.table.choose(point, self.chosen[phase])

    def decoders_of(self, num_rows: int) -> tuple[str, ...]:
        """Of decode steps of so many rows, whatever their lengths; the phase's best first."""
        uneven = (False, True) if num_rows >= MIN_UNEVEN_ROWS else (False,)
        lengths = rounded_prefixes(self.max_context_len)
        taken = {
            self.choose(StepPoint(AttentionPhase.DECODE, num_rows, 1, prefix, is_uneven)).name
            for is_uneven in uneven
            for prefix in lengths
        }
        return tuple(name for name in self.chosen[AttentionPhase.DECODE] if name in taken)

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
    return replace(
        point, new_tokens=_rounded(point.new_tokens), prefix_tokens=_prefix(point.prefix_tokens)
    )


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
