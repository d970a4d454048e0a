"""How long measuring may take, and what it took the time for. Numbers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from attention.timing import AttentionPhase


class TimeLimit:
    """max_seconds of a clock. What compiled kernels does not count, up to as much again: steps that
    need them would wait for them anyway. num_points: how many have been measured."""

    def __init__(self, max_seconds: float, clock: Callable[[], float]) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self.num_points = 0
        self._compiling_s = 0.0
        self._by_phase: defaultdict[AttentionPhase, float] = defaultdict(float)
        self._free_s = 0.0
        self._start_s = clock()

    def start_over(self) -> None:
        self._start_s, self._free_s = self._clock(), 0.0

    @property
    def is_over(self) -> bool:
        free_s = min(self._free_s, self._max_seconds)
        return self._clock() - self._start_s >= self._max_seconds + free_s

    def add(self, phase: AttentionPhase, seconds: float, compiling_s: float) -> None:
        """What a point took, compiling_s of it for kernels."""
        self.num_points += 1
        self._by_phase[phase] += seconds - compiling_s
        self._compiling_s += compiling_s
        self._free_s += compiling_s

    def __str__(self) -> str:
        phases = [f"{phase} {seconds:.1f} s" for phase, seconds in self._by_phase.items()]
        parts = ", ".join([*phases, f"compiling kernels {self._compiling_s:.1f} s"])
        return f"{self.num_points} kinds of steps took {parts}"
