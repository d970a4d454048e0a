"""Choices of GEMMs in files: those shipped for some GPUs, and those measured on this machine.

Shipped files lie in folders by compute capability, sm90/NVIDIA_H200.json. Knows no device and
measures nothing.
"""

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from workers.layers.gemm.configs import Choices, Config, GemmConfig, LtConfig

logger = logging.getLogger(__name__)

SHIPPED_FOLDER = Path(__file__).parent / "tuned"
_LT_KIND = "cublaslt"

Table = Mapping[str, Choices]
"""By the shape's text."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What is shipped for a GPU. known: measured on its model. guessed: measured on the nearest
    other one, where nothing is known; cuBLASLt's algorithms only of the same generation."""

    known: Table
    guessed: Table


def shipped_tables(folder: Path, device_name: str, compute_capability: tuple[int, int]) -> Tables:
    """device_name: as the driver gives it."""
    name = _file_name(device_name)
    generation = _generation(compute_capability)
    own = folder / generation / f"{name}.json"
    if own.is_file():
        return Tables(read_choices(own), {})
    nearest = _nearest(sorted(folder.glob("sm*/*.json")), generation, name)
    if nearest is None:
        return Tables({}, {})
    logger.info("no GEMMs were chosen for %s: those for %s are tried", device_name, nearest.stem)
    guessed = read_choices(nearest)
    if nearest.parent.name != generation:
        guessed = {shape: _without_algorithms(choices) for shape, choices in guessed.items()}
    return Tables({}, guessed)


def cached_path(folder: Path, device_name: str, torch_version: str) -> Path:
    """Where choices of a GPU model are kept on this machine."""
    return folder / f"gemm-{_file_name(device_name)}-{torch_version}.json"


def _file_name(device_name: str) -> str:
    return device_name.replace(" ", "_").replace("/", "_")


def _generation(compute_capability: tuple[int, int]) -> str:
    return "sm{}{}".format(*compute_capability)


def _nearest(paths: list[Path], generation: str, name: str) -> Path | None:
    """The one of the closest generation; of several the one whose name begins most like name."""

    def distance(path: Path) -> tuple[int, int, int]:
        theirs, ours = int(path.parent.name[2:]), int(generation[2:])
        majors, minors = abs(theirs // 10 - ours // 10), abs(theirs % 10 - ours % 10)
        return majors, minors, -len(os.path.commonprefix([path.stem, name]))

    return min(paths, key=distance, default=None)


def _without_algorithms(choices: Choices) -> Choices:
    return {n: config for n, config in choices.items() if not isinstance(config, LtConfig)}


def merged(first: Table, second: Table) -> dict[str, Choices]:
    """Both; where they differ, the second."""
    return {key: first.get(key, {}) | second.get(key, {}) for key in {**first, **second}}


def keep_choices(path: Path, measured: Table) -> None:
    """Add to what path holds. Other processes may do so at the same time: none loses anything.

    A folder that cannot be written to costs measuring at the next start, not this one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial = path.with_suffix(f".partial-{os.getpid()}")
            partial.write_text(dump_choices(merged(kept_choices(path), measured)), encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        logger.warning("measured GEMMs are not kept for the next start: %s", error)


def kept_choices(path: Path) -> dict[str, Choices]:
    """What keep_choices wrote; nothing, and a warning, of a file that is broken or of a version
    that wrote other fields. What it held is measured anew, and the next keep_choices replaces it.
    """
    try:
        return read_choices(path)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        logger.warning("measured GEMMs in %s are of no use: %r", path, error)
        return {}


def dump_choices(choices: Table) -> str:
    """As JSON: shape -> bucket -> the config's kind and fields in order, or null for cuBLAS."""
    table = {
        shape: {str(n): _row(config) for n, config in sorted(by_tokens.items())}
        for shape, by_tokens in choices.items()
    }
    lines = [f"  {json.dumps(shape)}: {json.dumps(row)}" for shape, row in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_choices(path: Path) -> dict[str, Choices]:
    """What dump_choices wrote; nothing if there is no file. Raises whatever a broken one causes."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        shape: {int(n): _config(row) for n, row in by_tokens.items()}
        for shape, by_tokens in table.items()
    }


def _row(config: Config) -> list[Any] | None:
    if isinstance(config, LtConfig):
        return [_LT_KIND, *astuple(config)]
    return None if config is None else list(astuple(config))


def _config(row: list[Any] | None) -> Config:
    if row is None:
        return None
    return LtConfig(*row[1:]) if row[0] == _LT_KIND else GemmConfig(*row)
