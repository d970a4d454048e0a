"""Candidates with known costs: no device is timed."""

from dataclasses import dataclass, field

from attention.timing import AttentionPhase
from attention.tuning.points import StepPoint
from attention.tuning.tune import PointResult

DECODE, EXTEND = AttentionPhase.DECODE, AttentionPhase.EXTEND


def decode(rows, prefix, is_uneven=False):
    return StepPoint(DECODE, rows, 1, prefix, is_uneven)


def extend(rows, new, prefix=0, is_uneven=False):
    return StepPoint(EXTEND, rows, new, prefix, is_uneven)


class ManualClock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@dataclass
class KnownCosts:
    """MeasurePoint: a candidate's cost is a function of the point; what is no number is raised as
    its error. Every measured point moves the clock on by step_s, and by what compiling_s has for
    it."""

    costs: dict
    clock: ManualClock = field(default_factory=ManualClock)
    step_s: float = 0.1
    compiling_s: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)

    def __call__(self, point, names):
        self.asked.append((point, tuple(names)))
        compiling_s = self.compiling_s.get(point, 0.0)
        self.clock.now_s += self.step_s + compiling_s
        results = {name: self.costs[name](point) for name in names}
        return PointResult(
            {name: cost for name, cost in results.items() if not isinstance(cost, str)},
            {name: cost for name, cost in results.items() if isinstance(cost, str)},
            compiling_s,
        )
