"""Lanes of GPUs and their jobs, as a plan in TOML has them (lanes.py says how). Starts nothing."""

import math
import shlex
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """needs: a file that is there when a job may start; None: at once."""

    command: str
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class LaneJob:
    name: str
    limit_s: float
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    needs: Path | None


@dataclass(frozen=True, slots=True)
class GpuLane:
    gpus: tuple[int, ...]
    cores: frozenset[int]
    jobs: tuple[LaneJob, ...]


def job_of(line: str, kinds: Mapping[str, Kind], values: Mapping[str, str]) -> LaneJob:
    """Raises ValueError where line is no job."""
    try:
        name, limit_s, kind_name, *arguments = shlex.split(line)
        if "/" in name or not 0 < float(limit_s) < math.inf:
            raise ValueError("NAME is a log's, LIMIT_S above 0")
        kind = kinds[kind_name]
        arguments = [argument.format(**values) for argument in arguments]
        named = {**values, "rest": shlex.join(arguments[_num_places(kind.command) :])}
        return LaneJob(
            name,
            float(limit_s),
            tuple(shlex.split(kind.command.format(*arguments, **named))),
            Path(kind.folder.format(*arguments, **named)),
            {key: one.format(*arguments, **named) for key, one in kind.environment.items()},
            None if kind.needs is None else Path(kind.needs.format(*arguments, **named)),
        )
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{line!r} is no NAME LIMIT_S KIND ARGUMENT ...: {error!r}") from error


def lanes_of(
    plan: Mapping[str, Any], given: Mapping[str, str], cores: Iterable[int]
) -> list[GpuLane]:
    """given: values instead of the plan's. Raises ValueError where a part of the plan is wrong."""
    _check_keys("plan", plan, {"values", "kinds", "lanes"})
    for lane in plan.get("lanes", ()):
        _check_keys("lane", lane, {"gpus", "jobs"})
    values = {**plan.get("values", {}), **given}
    try:
        kinds = {name: Kind(**one) for name, one in plan["kinds"].items()}
        lanes = [
            (_num_gpus(lane), tuple(job_of(line, kinds, values) for line in lane["jobs"]))
            for lane in plan["lanes"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan: {error!r}") from error
    return _on_host(lanes, sorted(cores))


def values_of(entries: Sequence[str], plans: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of NAME=VALUE each. Raises ValueError for others, and for a NAME that is no plan's."""
    given: dict[str, str] = {}
    known = {name for plan in plans for name in plan.get("values", {})}
    for entry in entries:
        name, is_equal, given[name] = entry.partition("=")
        if not is_equal:
            raise ValueError(f"{entry!r} is no NAME=VALUE")
        if name not in known:
            raise ValueError(f"no plan has a value {name}")
    return given


def one_behind_the_other(plans: Sequence[Sequence[GpuLane]]) -> list[GpuLane]:
    """Lanes with the jobs of all plans. Raises ValueError where plans share GPUs out otherwise, or
    jobs have one name."""
    if len({tuple(lane.gpus for lane in lanes) for lanes in plans}) > 1:
        raise ValueError("plans of one run share GPUs out alike")
    names = [job.name for lanes in plans for lane in lanes for job in lane.jobs]
    if len(set(names)) < len(names):
        raise ValueError("jobs of one name would write one log")
    return [
        replace(lanes[0], jobs=tuple(job for lane in lanes for job in lane.jobs))
        for lanes in zip(*plans, strict=True)
    ]


def _on_host(lanes: Sequence[tuple[int, tuple[LaneJob, ...]]], cores: list[int]) -> list[GpuLane]:
    """lanes: numbers of GPUs, and jobs."""
    num_gpus = sum(size for size, _ in lanes)
    share, made, first = max(1, len(cores) // max(1, num_gpus)), [], 0
    for size, jobs in lanes:
        own = cores[first * share : (first + size) * share] or cores
        made.append(GpuLane(tuple(range(first, first + size)), frozenset(own), jobs))
        first += size
    return made


def _check_keys(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = set(given) - known
    if unknown:
        raise ValueError(f"a {what} has no {', '.join(sorted(unknown))}")


def _num_gpus(lane: Mapping[str, Any]) -> int:
    size: int = lane["gpus"]
    if type(size) is not int or size < 1:
        raise ValueError(f"a lane has one GPU or more, not {size!r}")
    return size


def _num_places(text: str) -> int:
    """How many of the arguments text names by their numbers: all up to the last of these."""
    names = [name for _, name, _, _ in string.Formatter().parse(text) if name]
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)
