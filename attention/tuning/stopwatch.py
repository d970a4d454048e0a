"""Two ways to tell time: a host's clock, and a GPU's events around graphs and launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attention.tuning.measure import Run
from attention.tuning.turns import USUAL_TURNS, TimedRun, Turns, take_turns

_HOST_TURNS = 3
_CYCLES_PER_SECOND = 2e9
"""Of a GPU's clock, about: a slower one waits longer."""


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


@dataclass(frozen=True, slots=True)
class _EventTimes:
    """Of a run between two events."""

    start: torch.cuda.Event
    stop: torch.cuda.Event
    host_s: float
    is_hidden: bool

    def seconds(self) -> float:
        return float(self.start.elapsed_time(self.stop)) / 1e3


class CudaStopwatch:
    """On the current stream of a device. What its L2 cache holds is overwritten before each turn:
    in a step, weights are read between two layers' attention. capture: records launches once and
    returns what repeats them."""

    def __init__(self, device: torch.device, capture: Callable[[Run], Run]) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._device = device
        self._capture = capture
        self._other_bytes = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)

    def record(self, run: Run) -> Run:
        return self._capture(run)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, runs: Mapping[str, Run]) -> dict[str, float]:
        return {name: statistics.median(own) for name, own in self.turns(runs, USUAL_TURNS).items()}

    def turns(self, runs: Mapping[str, Run], limits: Turns) -> dict[str, list[float]]:
        """Seconds of each run in each of its turns."""
        return take_turns(runs, self._launch, self.wait, limits)

    def _launch(self, run: Run, lead_s: float) -> TimedRun:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._other_bytes.zero_()
        torch.cuda._sleep(int(lead_s * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        start.record()
        start_s = time.perf_counter()
        run()
        stop.record()
        host_s = time.perf_counter() - start_s
        is_hidden = not start.query()  # type: ignore[no-untyped-call]
        return _EventTimes(start, stop, host_s, is_hidden)
