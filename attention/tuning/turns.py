"""Candidates by turns: in which order, how often, and how long a device waits before each.

A device that waits until the host has launched all of a run tells its own time, and not the host's,
which a step hides. Knows no device: what launches a run and times it is handed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from attention.tuning.measure import Run

MIN_LEAD_S = 1e-4
MAX_LEAD_S = 0.016
"""What waits for the device between its launches fits in no lead: its time is the host's, too."""
_LEAD_OVER_HOST = 1.5
"""What a host needs to launch the same again varies by less."""
SLOW_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Turns:
    """How often each candidate is timed: seconds long, but so many times at least and at most.
    least_long: where one takes long_s at once; what disturbs a turn is short beside that."""

    least: int = 7
    most: int = 21
    seconds: float = 0.02
    least_long: int = 3
    long_s: float = 0.02

    def number(self, longest_s: float) -> int:
        """For candidates of which the slowest takes longest_s."""
        least = min(self.least, self.least_long) if longest_s >= self.long_s else self.least
        return min(self.most, max(least, int(self.seconds / max(longest_s, 1e-6))))


USUAL_TURNS = Turns()


class TimedRun(Protocol):
    """host_s: what launching it took. is_hidden: whether the device began only after that."""

    @property
    def host_s(self) -> float: ...

    @property
    def is_hidden(self) -> bool: ...

    def seconds(self) -> float:
        """Of the device. Only behind what ends it."""


Launch = Callable[[Run, float], TimedRun]
"""Launches a run behind a wait of so many seconds on the device."""


def take_turns(
    runs: Mapping[str, Run], launch: Launch, wait: Callable[[], None], turns: Turns
) -> dict[str, list[float]]:
    """Seconds of each run in each of its turns. wait: until the device has done all of it.

    The order changes at random from turn to turn, so that nobody comes behind the same one, whose
    traces in caches and clocks last. Runs SLOW_RATIO times slower than the fastest have one turn.
    Turns that the host did not hide count only where none was hidden.
    """
    leads_s, firsts = {}, {}
    for name, run in runs.items():
        leads_s[name], firsts[name] = _first_turn(run, launch, wait)
    wait()
    times = {name: [timed.seconds()] for name, timed in firsts.items()}
    fastest_s = min(own[0] for own in times.values())
    near = [name for name, own in times.items() if own[0] <= SLOW_RATIO * fastest_s]
    longest_s = max(times[name][0] for name in near)
    timed: dict[str, list[TimedRun]] = {name: [] for name in near}
    order = random.Random(0)
    for _ in range(turns.number(longest_s)):
        for name in order.sample(near, len(near)):
            timed[name].append(launch(runs[name], leads_s[name]))
    wait()
    return times | {name: _device_seconds(own) for name, own in timed.items()}


def _first_turn(run: Run, launch: Launch, wait: Callable[[], None]) -> tuple[float, TimedRun]:
    """And the lead that hides its launches from a device that has nothing else to do, or the
    longest there is."""
    lead_s = MIN_LEAD_S
    while True:
        wait()
        timed = launch(run, lead_s)
        if timed.is_hidden or lead_s >= MAX_LEAD_S:
            return lead_s, timed
        lead_s = min(MAX_LEAD_S, max(2.0 * lead_s, _LEAD_OVER_HOST * timed.host_s))


def _device_seconds(timed: list[TimedRun]) -> list[float]:
    hidden = [one for one in timed if one.is_hidden]
    return [one.seconds() for one in hidden or timed]
