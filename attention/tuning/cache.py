"""Measured attention in files of this machine, one for what it was measured of and with.

A file names all that its times depend on: GPU, versions of torch and of the kernels' packages, this
package's own code, shapes, candidates. Another one of any of these is another file.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention.timing import AttentionPhase
from attention.tuning.points import StepPoint
from attention.tuning.table import LeftOut, TuningTable

logger = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""What times depend on, by name."""

KERNEL_PACKAGES = (
    "torch",
    "triton",
    "sglang-kernel",
    "flash_attn_3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "apache-tvm-ffi",
)
_HASH_DIGITS = 16


def default_folder() -> Path:
    return Path.home() / ".cache" / "tessera"


def package_versions(names: Iterable[str] = KERNEL_PACKAGES) -> str:
    """Of those that are installed."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def code_version(folder: Path) -> str:
    """A hash of a package's Python sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_HASH_DIGITS]


def table_path(folder: Path, device_name: str, facts: Facts) -> Path:
    text = json.dumps(dict(sorted(facts.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    device = device_name.replace(" ", "_").replace("/", "_")
    return folder / f"attention-{device}-{digest}.json"


def keep_times(path: Path, facts: Facts, table: TuningTable) -> None:
    """Add the table's times to what path holds. Other processes may do so at the same time.

    A folder that cannot be written to costs measuring at the next start, not this one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = kept_times(path)
            for point, at in table.seconds.items():
                kept[point] = kept.get(point, {}) | dict(at)
            partial = path.with_suffix(f".partial-{os.getpid()}")
            content = {"facts": dict(facts), "points": _rows(kept)}
            partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        logger.warning("measured attention is not kept for the next start: %s", error)


def kept_times(path: Path) -> dict[StepPoint, dict[str, float]]:
    """What keep_times wrote; nothing, and a warning, of a file that is broken."""
    if not path.is_file():
        return {}
    try:
        return _points(json.loads(path.read_text(encoding="utf-8"))["points"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        logger.warning("measured attention in %s is of no use: %r", path, error)
        return {}


def with_times(table: TuningTable, times: Mapping[StepPoint, Mapping[str, float]]) -> TuningTable:
    return replace(table, seconds={**times, **table.seconds})


def table_to_json(table: TuningTable) -> str:
    return json.dumps(
        {
            "names": {phase.value: list(names) for phase, names in table.names.items()},
            "points": _rows(table.seconds),
            "left_out": [
                [one.phase.value, one.name, one.reason, one.stand_in] for one in table.left_out
            ],
        }
    )


def table_from_json(text: str) -> TuningTable:
    """What table_to_json wrote."""
    content = json.loads(text)
    return TuningTable(
        {AttentionPhase(phase): tuple(names) for phase, names in content["names"].items()},
        _points(content["points"]),
        tuple(
            LeftOut(AttentionPhase(phase), name, reason, stand_in)
            for phase, name, reason, stand_in in content["left_out"]
        ),
    )


def _rows(times: Mapping[StepPoint, Mapping[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "phase": point.phase.value,
            "rows": point.rows,
            "new_tokens": point.new_tokens,
            "prefix_tokens": point.prefix_tokens,
            "is_uneven": point.is_uneven,
            "seconds": dict(times[point]),
        }
        for point in sorted(times)
    ]


def _points(rows: Iterable[Mapping[str, Any]]) -> dict[StepPoint, dict[str, float]]:
    return {
        StepPoint(
            AttentionPhase(row["phase"]),
            int(row["rows"]),
            int(row["new_tokens"]),
            int(row["prefix_tokens"]),
            bool(row["is_uneven"]),
        ): {str(name): _time(seconds) for name, seconds in row["seconds"].items()}
        for row in rows
    }


def _time(seconds: Any) -> float:
    """Raises ValueError for what no candidate takes: logarithms of times are compared."""
    time_s = float(seconds)
    if not 0.0 < time_s < math.inf:
        raise ValueError(f"{time_s} s is no time")
    return time_s
