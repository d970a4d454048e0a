"""Two ways to tell time: a host's clock, and a GPU's events around graphs and launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attention.tuning.measure import Run

_HOST_TURNS = 3
_SECONDS_OF_TURNS = 0.02
_LEAD_CYCLES = 200_000
"""About 100 us of a GPU's clock: enough for the host to launch what is timed."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How often each candidate is timed: fewer times where it takes long."""

    least: int = 5
    most: int = 15


USUAL_TURNS = Turns()


class HostStopwatch:
    """Where a call has ended when it returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def record(self, run: Run) -> Run:
        run()
        return run

    def wait(self) -> None:
        """Nothing is ever under way."""

    def seconds(self, runs: Mapping[str, Run]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(_HOST_TURNS):
            for name, run in runs.items():
                start_s = self._clock()
                run()
                times[name].append(self._clock() - start_s)
        return {name: statistics.median(own) for name, own in times.items()}


class CudaStopwatch:
    """On the current stream of a device. What its L2 cache holds is overwritten before each turn:
    in a step, weights are read between two layers' attention. The device waits before it starts, so
    that its time is told and not the host's, which a step hides. capture: records launches once and
    returns what repeats them."""

    def __init__(
        self, device: torch.device, capture: Callable[[Run], Run], turns: Turns = USUAL_TURNS
    ) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._device = device
        self._capture = capture
        self._limits = turns
        self._other_bytes = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)

    def record(self, run: Run) -> Run:
        return self._capture(run)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, runs: Mapping[str, Run]) -> dict[str, float]:
        first = self._turns(runs, 1)
        longest = max(own[0] for own in first.values())
        num_turns = int(_SECONDS_OF_TURNS / max(longest, 1e-6))
        limits = self._limits
        times = self._turns(runs, min(limits.most, max(limits.least, num_turns)))
        return {name: statistics.median(own) for name, own in times.items()}

    def _turns(self, runs: Mapping[str, Run], num_turns: int) -> dict[str, list[float]]:
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runs}
        names = list(runs)
        for turn in range(num_turns):
            # Nobody always comes behind the same one, whose traces in host caches last.
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._other_bytes.zero_()
                torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
                start.record()
                runs[name]()
                stop.record()
                events[name].append((start, stop))
        self.wait()
        return {
            name: [start.elapsed_time(stop) / 1e3 for start, stop in own]
            for name, own in events.items()
        }
