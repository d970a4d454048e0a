"""The processes of a cluster, and how they are killed.

All are descendants of this process, so nothing else on the machine can be hit. Knows titles and
application names. Knows no Ray and no client.
"""

import random
import signal
import time
from collections.abc import Callable

import psutil

from tests.integration.chaos.applications import Application
from tests.integration.chaos.kills import Kill, KillKind

_NEVER_LEAVES_S = 15.0
_SUCCESSOR_COMES_S = 60.0
_LOOK_S = 0.05
_TITLES = {
    KillKind.CONTROLLER: "ServeController",
    KillKind.REGISTRY: "RegistryActor",
    KillKind.METRICS: "ExporterActor",
    KillKind.RANK: "RankProcess",
    KillKind.STOP_RANK: "RankProcess",
}
_STOPS = (KillKind.STOP, KillKind.STOP_START, KillKind.STOP_RANK)


class ClusterProcesses:
    """start(), then kill() again and again from one thread; shut_down() at the end."""

    def __init__(self, applications: list[Application]) -> None:
        self.applications = applications
        self._seen: dict[int, psutil.Process] = {}
        self._stopped: set[int] = set()

    def kill(
        self, kind: KillKind, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        """None if there is nothing of that kind right now. on_kill comes before the harm."""
        if kind is KillKind.STOP_START:
            return self._kill_and_stop_successor(rng, on_kill)
        victims = self._candidates(kind)
        return self._harm(rng.choice(victims), kind, on_kill) if victims else None

    def start(self) -> None:
        """Returns while the applications still start."""
        raise NotImplementedError

    def shut_down(self) -> None:
        """Whatever is still there ends."""
        raise NotImplementedError

    def missing(self) -> list[str]:
        """What of the cluster itself is not there, beside the applications' processes."""
        return []

    def _harm(
        self, victim: psutil.Process, kind: KillKind, on_kill: Callable[[Kill], None]
    ) -> Kill:
        record = Kill(kind, time.monotonic(), title(victim))
        self._count(record, victim)
        on_kill(record)
        if kind in _STOPS:
            self._stopped.add(victim.pid)
            victim.send_signal(signal.SIGSTOP)
        else:
            victim.kill()
        return record

    def _kill_and_stop_successor(
        self, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        """None if no engine was there, or no other came for it."""
        known = {process.pid for process in self._candidates(KillKind.STOP)}
        if self.kill(KillKind.ENGINE, rng, on_kill) is None:
            return None
        end_s = time.monotonic() + _SUCCESSOR_COMES_S
        while time.monotonic() < end_s:
            for process in self._candidates(KillKind.STOP):
                if process.pid not in known:
                    return self._harm(process, KillKind.STOP_START, on_kill)
            time.sleep(_LOOK_S)
        return None

    def num_engines(self, application: Application) -> int:
        """Live engine replicas, without those that were stopped."""
        wanted = f"ServeReplica:{application.name}:Engine"
        return sum(wanted in title(one) for one in self._processes() if not self._is_out(one))

    def stopped(self) -> list[str]:
        """Processes that were stopped and are still there."""
        left = [self._seen[pid] for pid in sorted(self._stopped) if is_running(self._seen[pid])]
        return [f"{one.pid} {title(one)}" for one in left]

    def orphans(self) -> list[str]:
        """Processes that the cluster had and that no raylet holds any longer, stopped or not."""
        held = {process.pid for process in self._processes()}
        lost = [one for pid, one in self._seen.items() if pid not in held and is_running(one)]
        return [f"{one.pid} {title(one)}" for one in lost]

    def unwatched(self) -> list[str]:
        """Engines and ingresses that nobody would kill if they stood still."""
        replicas = [one for one in self._processes() if "ServeReplica:" in title(one)]
        return [f"{one.pid} {title(one)}" for one in replicas if not _is_watched(one)]

    def survivors(self) -> list[str]:
        """After shut_down(): what did not go, and is ended now."""
        running = [one for one in self._seen.values() if is_running(one)]
        _, left = psutil.wait_procs(running, timeout=_NEVER_LEAVES_S)
        titles = [f"{one.pid} {title(one)}" for one in left if is_running(one)]
        for one in left:
            one.kill()
        return titles

    def _processes(self) -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        for process in found:
            self._seen.setdefault(process.pid, process)
        return found

    def _is_out(self, process: psutil.Process) -> bool:
        return process.pid in self._stopped or not is_running(process)

    def _candidates(self, kind: KillKind) -> list[psutil.Process]:
        if kind in (KillKind.ENGINE, KillKind.STOP):
            wanted = [f"ServeReplica:{one.name}:Engine" for one in self.applications]
        elif kind is KillKind.INGRESS:
            wanted = [f"ServeReplica:{one.name}:Ingress" for one in self.applications]
        else:
            wanted = [_TITLES[kind]]
        return [
            process
            for process in self._processes()
            if any(part in title(process) for part in wanted)
            and not self._is_out(process)
            and (kind is not KillKind.STOP or _is_watched(process))
        ]

    def _count(self, record: Kill, process: psutil.Process) -> None:
        """Add what dies with this process to the record."""
        name = title(process)
        for application in self.applications:
            is_rank = "RankProcess" in name and record.kind is not KillKind.RAYLET
            if f"ServeReplica:{application.name}:Engine" in name or (
                is_rank and application.tp_size > 1
            ):
                record.num_engines[application.name] = (
                    record.num_engines.get(application.name, 0) + 1
                )
            elif f"ServeReplica:{application.name}:Ingress" in name:
                record.num_ingresses[application.name] = (
                    record.num_ingresses.get(application.name, 0) + 1
                )


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_watched(process: psutil.Process) -> bool:
    """Whether it runs code of ours; docs/operations.md says what stops before that comes to."""
    try:
        return any("silence_watch" in title(child) for child in process.children())
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
