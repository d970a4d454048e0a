"""Attack a service for a while and see what its other clients feel.

    python -m benchmarks.attacks [--seconds 60] [--attack NAME ...] [--open]

For each attack: a quiet phase, the attack, a quiet phase, with an honest client all the time. Exit
code 1 if the service's memory grew by more than 32 MiB, if the honest client's p99 time to first
token was twice that of the quiet phases or more, if a request of it failed, or if half-sent bodies
held the drain at the end.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.attacks.attackers import ATTACKS, Strike, run_attack
from benchmarks.attacks.honest import Experience, Experiences, merged, use_service
from benchmarks.attacks.target import Ports
from benchmarks.attacks.victim import DRAIN_TIMEOUT_S, run_victim

MAX_GROWTH_MIB = 32.0
MAX_P99_RATIO = 2.0
MAX_DRAIN_S = DRAIN_TIMEOUT_S / 3
NUM_HALF_BODIES = 50
_STEP_S = 0.01
_SAMPLE_S = 0.2
_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one attack. growth_mib: of the service's resident memory over what it was before."""

    name: str
    quiet: Experiences
    attacked: Experiences
    growth_mib: float
    strike: Strike

    def p99_ratio(self, protocol: str) -> float:
        return self.attacked[protocol].percentile_ms(99) / self.quiet[protocol].percentile_ms(99)

    @property
    def failures(self) -> list[str]:
        given: list[Experience] = [*self.quiet.values(), *self.attacked.values()]
        return [failure for experience in given for failure in experience.failures]

    @property
    def holds(self) -> bool:
        """NaN, where nothing was answered, does not."""
        is_quick = all(self.p99_ratio(protocol) < MAX_P99_RATIO for protocol in self.quiet)
        return self.growth_mib <= MAX_GROWTH_MIB and is_quick and not self.failures


class Memory:
    """The most that a process had resident, sampled by a thread of this one."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._is_over = threading.Event()
        self.first_mib = self.most_mib = self._resident_mib()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self.most_mib = max(self.most_mib, self._resident_mib())

    def _resident_mib(self) -> float:
        return int(self._file.read_text().split()[1]) * self._page_bytes / (1 << 20)


def measure(name: str, ports: Ports, attack_s: float, rate_per_s: float) -> Outcome:
    """One attack between two quiet phases, each half as long."""
    ours, theirs = _processes.Pipe()
    before = asyncio.run(use_service(ports, attack_s / 2, rate_per_s))
    attacker = _processes.Process(
        target=run_attack, args=(theirs, name, ports, attack_s), daemon=True
    )
    attacker.start()
    theirs.close()
    try:
        ours.recv()
        with Memory(ports.pid) as memory:
            attacked = asyncio.run(use_service(ports, attack_s, rate_per_s))
        strike: Strike = ours.recv()
    finally:
        attacker.terminate()
        attacker.join()
    after = asyncio.run(use_service(ports, attack_s / 2, rate_per_s))
    return Outcome(
        name, merged(before, after), attacked, memory.most_mib - memory.first_mib, strike
    )


def measure_drain(ports: Ports, victim: Connection) -> float:
    """How many seconds a drain lasts while so many bodies are half sent."""
    return asyncio.run(_drain_half_bodies(ports, victim))


async def _drain_half_bodies(ports: Ports, victim: Connection) -> float:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    held = [await asyncio.open_connection("127.0.0.1", ports.http) for _ in range(NUM_HALF_BODIES)]
    for _, writer in held:
        writer.write(head)
        await writer.drain()
    await asyncio.sleep(_SAMPLE_S)
    victim.send("drain")
    drain_s: float = await asyncio.to_thread(victim.recv)
    for _, writer in held:
        writer.close()
    return drain_s


def run(arguments: argparse.Namespace) -> tuple[list[Outcome], float]:
    """Every attack in turn on one service, and the drain at its end."""
    ours, theirs = _processes.Pipe()
    victim = _processes.Process(
        target=run_victim, args=(theirs, _STEP_S, arguments.open), daemon=True
    )
    victim.start()
    theirs.close()  # so that its end is seen
    try:
        ports: Ports = ours.recv()
        asyncio.run(use_service(ports, min(2.0, arguments.seconds), arguments.rate))  # warm up
        outcomes = []
        for name in arguments.attack or ATTACKS:
            outcomes.append(measure(name, ports, arguments.seconds, arguments.rate))
            print_outcome(outcomes[-1])
        return outcomes, measure_drain(ports, ours)
    finally:
        victim.terminate()
        victim.join()


_COLUMNS = (
    "| attack | held | HTTP: quiet, attacked p99 ms (ratio) | gRPC: quiet, attacked p99 ms (ratio) "
    "| memory MiB | requests, failed | streams, cut off | MiB sent |"
)


def print_outcome(outcome: Outcome) -> None:
    strike = outcome.strike
    num_requests = sum(
        len(one.ttft_s) + len(one.failures)
        for one in (*outcome.quiet.values(), *outcome.attacked.values())
    )
    cells = (
        outcome.name,
        "yes" if outcome.holds else "NO",
        *(
            f"{outcome.quiet[protocol].percentile_ms(99):.1f}, "
            f"{outcome.attacked[protocol].percentile_ms(99):.1f} "
            f"({outcome.p99_ratio(protocol):.2f})"
            for protocol in outcome.quiet
        ),
        f"{outcome.growth_mib:+.1f}",
        f"{num_requests}, {len(outcome.failures)}",
        f"{strike.num_streams}, {strike.num_cut}",
        f"{strike.num_bytes / (1 << 20):.1f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    for reason in sorted(set(outcome.failures))[:3]:
        print(f"failed: {reason}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="all by default")
    parser.add_argument(
        "--rate", type=float, default=20.0, help="honest requests a second, of each protocol"
    )
    parser.add_argument("--open", action="store_true", help="nobody needs an API key")
    return parser.parse_args()


def main() -> int:
    print(_COLUMNS, flush=True)
    outcomes, drain_s = run(parse_arguments())
    print(
        f"drain with {NUM_HALF_BODIES} half-sent bodies: {drain_s:.1f} s of {DRAIN_TIMEOUT_S:.0f}"
    )
    return 0 if all(one.holds for one in outcomes) and drain_s < MAX_DRAIN_S else 1


if __name__ == "__main__":
    sys.exit(main())
