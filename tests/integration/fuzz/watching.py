"""What a service's processes do while they are sent nonsense: how long their loop is away, and what
their memory grows by."""

import threading
import time

import httpx
import psutil

from tests.integration.services import RunningService, replica_processes

_PAUSE_S = 0.02
_SAMPLE_S = 1.0
_PING_TIMEOUT_S = 60.0


class Watch:
    """run() in a thread until stopped. grown_mib: by process, from the first sample to the last, at
    most. Times are of this machine, which others share: they are told, not judged."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self._waits_s: list[float] = []
        self._processes = replica_processes(service.config.app_name)
        self._first = {process: _rss_mib(process) for process in self._processes}
        self._most = dict(self._first)

    def run(self, stopped: threading.Event) -> None:
        next_sample_s = 0.0
        is_over = False
        with httpx.Client(base_url=self._service.url, timeout=_PING_TIMEOUT_S) as client:
            while not is_over:
                is_over = stopped.wait(_PAUSE_S)
                started_s = time.perf_counter()
                client.get("/ping").raise_for_status()
                self._waits_s.append(time.perf_counter() - started_s)
                if started_s >= next_sample_s:
                    next_sample_s = started_s + _SAMPLE_S
                    self._sample()

    @property
    def grown_mib(self) -> dict[str, float]:
        return {
            f"{' '.join(process.cmdline())[:60]} {process.pid}": most - self._first[process]
            for process, most in self._most.items()
        }

    def report(self) -> str:
        waits_s = sorted(self._waits_s)
        shown = ", ".join(
            f"{name} {1000 * waits_s[round(share * (len(waits_s) - 1))]:.0f} ms"
            for name, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
        )
        grown = ", ".join(f"{name}: {mib:.0f} MiB" for name, mib in self.grown_mib.items())
        return f"{len(waits_s)} pings beside: {shown}\nmost memory above the first: {grown}"

    def _sample(self) -> None:
        for process in self._processes:
            self._most[process] = max(self._most[process], _rss_mib(process))


def _rss_mib(process: psutil.Process) -> float:
    """Of it and its children: tokenizers are processes of their own."""
    family = [process, *process.children(recursive=True)]
    return sum(one.memory_info().rss for one in family) / (1 << 20)
