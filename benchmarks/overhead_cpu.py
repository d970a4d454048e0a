"""CPU time of a server's processes by what they do, read from /proc. Linux only.

Knows processes by what they call themselves; needs no package and no permission of the server.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# First match wins: what a command line contains, and the name of that kind of process.
_KINDS = (
    (":Ingress", "ingress"),
    (":Engine", "engine"),
    ("tokenizer.worker", "tokenizer"),
    ("haproxy -", "haproxy"),
    ("ProxyActor", "proxy"),
)
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc. cpu_s: user and system time of all its threads, ended ones included."""

    pid: int
    parent_pid: int
    command: str
    cpu_s: float


def read_processes(proc: Path = Path("/proc")) -> list[Process]:
    """Every process that could be read; those that end meanwhile are left out."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text(errors="replace")
                command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:
                continue  # it has ended since it was listed
            found.append(parse_process(int(folder.name), stat, command))
    return found


def parse_process(pid: int, stat: str, command: str) -> Process:
    """stat as in proc(5): the name in parentheses may hold anything."""
    fields = stat.rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Process(pid, int(fields[1]), command, cpu_s)


def descendants(processes: list[Process], root_pid: int) -> list[Process]:
    """The root and everything below it."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent_pid, []).append(process)
    found = [process for process in processes if process.pid == root_pid]
    for process in found:  # grows while it is read
        found.extend(children.get(process.pid, []))
    return found


def cpu_seconds_by_kind(processes: list[Process]) -> dict[str, float]:
    total: dict[str, float] = {}
    for process in processes:
        kind = kind_of(process.command)
        total[kind] = total.get(kind, 0.0) + process.cpu_s
    return total


def kind_of(command: str) -> str:
    return next((kind for text, kind in _KINDS if text in command), OTHER)


def used_since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind between two readings, without kinds that did nothing."""
    spent = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
    return {kind: seconds for kind, seconds in spent.items() if seconds > 0}
