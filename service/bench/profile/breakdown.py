"""From a profiler's events to a step's parts. Knows names and times, no engine and no device."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from service.bench.profile.kernel_groups import Group, group_of_kernel


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One run of a kernel; microseconds on the device's clock."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one step by group, and the names that took most, with their seconds."""

    seconds: dict[Group, float]
    largest: list[tuple[str, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Advance:
    """By how much one kernel moved the end of all work. idle_us: nothing ran before it started."""

    name: str
    busy_us: float
    idle_us: float


def advances(events: Iterable[KernelEvent]) -> list[Advance]:
    """Each kernel's share of the critical path, in the order in which they end.

    Kernels overlap, dependent launches above all: durations add up to more than the time they take.
    """
    ordered = sorted(events, key=lambda event: event.start_us + event.duration_us)
    reached_us = min((event.start_us for event in ordered), default=0.0)
    found = []
    for event in ordered:
        end_us = event.start_us + event.duration_us
        idle_us = max(0.0, event.start_us - reached_us)
        found.append(Advance(event.name, max(0.0, end_us - reached_us) - idle_us, idle_us))
        reached_us = max(reached_us, end_us)
    return found


def device_breakdown(
    events: Sequence[KernelEvent], num_steps: int, num_largest: int = 8
) -> Breakdown:
    """The mean step of a run of num_steps."""
    seconds = dict.fromkeys(Group, 0.0)
    by_name: defaultdict[str, float] = defaultdict(float)
    for advance in advances(events):
        busy_s = advance.busy_us / 1e6 / num_steps
        seconds[group_of_kernel(advance.name)] += busy_s
        seconds[Group.IDLE] += advance.idle_us / 1e6 / num_steps
        by_name[advance.name] += busy_s
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:num_largest]
    return Breakdown(seconds, largest)
