"""What runs of the tests on a GPU proved, in a file by GPU. Knows no test and no pytest.

A file holds, by backend and by model, the latest run that ran any of its tests: cells with the
number of tests that passed and of those that failed, and the packages they ran with. A run replaces
those that it ran and leaves the others, as they need packages, or numbers of GPUs, that not every
run has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tests.proofs.cells import Cell

PACKAGES = ("torch", "triton", "sglang-kernel", "flashinfer-python", "flash-attn-4")


class BackendResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """passed, failed: numbers of tests by what they prove. packages: versions, of those that are
    installed. num_tests: that passed or failed, num_failed: that failed."""

    date: str
    packages: dict[str, str]
    num_tests: int
    num_failed: int
    passed: dict[str, int]
    failed: dict[str, int]


class GpuResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """gpu: as its driver calls it. compute_capability: as "sm90". models: by architecture, or kind
    of models, on one GPU; ranked_models: over several."""

    gpu: str
    compute_capability: str
    backends: dict[str, BackendResults]
    models: dict[str, BackendResults] = {}
    ranked_models: dict[str, BackendResults] = {}


class RunProofs:
    """Counts the tests of one run, of backends or of models."""

    def __init__(self) -> None:
        self._passed: dict[str, Counter[str]] = {}
        self._failed: dict[str, Counter[str]] = {}
        self._num_tests: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()

    def count(self, cells: Iterable[Cell], has_passed: bool) -> None:
        """One test, whose cells are these."""
        counted = self._passed if has_passed else self._failed
        cells = frozenset(cells)
        for backend, what in cells:
            counted.setdefault(backend, Counter())[what] += 1
        backends = {cell.backend for cell in cells}
        self._num_tests.update(backends)
        self._num_failed.update(() if has_passed else backends)

    def by_backend(self, date: str, packages: dict[str, str]) -> dict[str, BackendResults]:
        return {
            backend: BackendResults(
                date,
                packages,
                self._num_tests[backend],
                self._num_failed[backend],
                dict(sorted(self._passed.get(backend, {}).items())),
                dict(sorted(self._failed.get(backend, {}).items())),
            )
            for backend in sorted(self._num_tests)
        }


def installed_packages() -> dict[str, str]:
    """Versions of PACKAGES."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def file_name(gpu: str) -> str:
    """ "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def read_results(folder: Path) -> tuple[GpuResults, ...]:
    """Of every GPU, by name. Raises msgspec.ValidationError for a file that is none of these."""
    files = sorted(folder.glob("*.json"))
    return tuple(msgspec.json.decode(path.read_bytes(), type=GpuResults) for path in files)


def merge_results(older: GpuResults | None, run: GpuResults) -> GpuResults:
    """The run's backends and models, and those that it did not run as the older results have
    them."""
    if older is None:
        return run
    backends = dict(sorted({**older.backends, **run.backends}.items()))
    models = dict(sorted({**older.models, **run.models}.items()))
    ranked = dict(sorted({**older.ranked_models, **run.ranked_models}.items()))
    return GpuResults(run.gpu, run.compute_capability, backends, models, ranked)


def write_results(folder: Path, results: GpuResults) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(results.gpu)
    text = json.dumps(msgspec.to_builtins(results), indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path
