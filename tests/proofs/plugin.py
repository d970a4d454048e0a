"""For pytest: notes the cells of each test in its report, and writes what a run proved.

--proofs-to FOLDER adds the run's results to the committed ones and to what earlier runs wrote to
FOLDER, and writes all of it there, as tests/gpu/attention/results has them. --proofs-collected
FILE writes, as JSON, which tests prove what: node id to [[backend, what], ...]. Works over the
processes of pytest-xdist.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from tests.proofs.cells import MARKER, MODELS_MARKER, Cell, cells_of
from tests.proofs.results import (
    GpuResults,
    RunProofs,
    installed_packages,
    merge_results,
    read_results,
    write_results,
)

COMMITTED = Path(__file__).parents[1] / "gpu" / "attention" / "results"
_RANKS = "tests/gpu/parallel/"
_BACKENDS, _MODELS, _RANKED_MODELS = "backends", "models", "ranked_models"
_PROOFS = pytest.StashKey[dict[str, RunProofs]]()


def _served_cells_of(item: pytest.Item) -> frozenset[Cell]:
    if item.get_closest_marker(MODELS_MARKER) is None:
        return frozenset()
    # Transformers: seconds that tests of attention do without.
    from tests.proofs.served import served_cells_of

    return served_cells_of(item)


_CELLS_OF = {MARKER: cells_of, MODELS_MARKER: _served_cells_of}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs")
    group.addoption("--proofs-to", type=Path, help="folder for what this run proves on its GPU")
    group.addoption("--proofs-collected", type=Path, help="file for what collected tests prove")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = {kind: RunProofs() for kind in (_BACKENDS, _MODELS, _RANKED_MODELS)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before a run's report is made, whose properties go from process to process."""
    for item in items:
        for marker, of_item in _CELLS_OF.items():
            cells = sorted(of_item(item))
            if cells:
                item.user_properties.append((marker, [list(cell) for cell in cells]))


def pytest_collection_finish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("proofs_collected")
    if path is not None:
        collected = {item.nodeid: _all_cells(item.user_properties) for item in session.items}
        proving = {name: sorted(cells) for name, cells in collected.items() if cells}
        path.write_text(json.dumps(proving), encoding="utf-8")


class _Recorder:
    """In the one process that hears of every test."""

    def __init__(self, proofs: Mapping[str, RunProofs]) -> None:
        self._proofs = proofs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (report.failed or (report.when == "call" and report.passed)):
            return
        for marker in _CELLS_OF:
            cells = _cells(report.user_properties, marker)
            if cells:
                proofs = self._proofs[_kind(marker, report.nodeid)]
                proofs.count(cells, has_passed=report.passed)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("proofs_to") is not None and not is_worker:
        session.config.pluginmanager.register(_Recorder(session.config.stash[_PROOFS]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder: Path | None = session.config.getoption("proofs_to")
    if folder is None or hasattr(session.config, "workerinput"):
        return
    major, minor = torch.cuda.get_device_capability(0)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    proved = {
        kind: proofs.by_backend(today, installed_packages())
        for kind, proofs in session.config.stash[_PROOFS].items()
    }
    run = GpuResults(torch.cuda.get_device_name(0), f"sm{major}{minor}", **proved)
    older = None
    for results in (*read_results(COMMITTED), *read_results(folder)):
        older = merge_results(older, results) if results.gpu == run.gpu else older
    path = write_results(folder, merge_results(older, run))
    num_passed = sum(len(one.passed) for kind in proved.values() for one in kind.values())
    print(f"\n{num_passed} cells passed: {path}")


def _kind(marker: str, nodeid: str) -> str:
    """Of GpuResults."""
    if marker == MARKER:
        return _BACKENDS
    return _RANKED_MODELS if nodeid.startswith(_RANKS) else _MODELS


def _all_cells(properties: Iterable[tuple[str, object]]) -> frozenset[Cell]:
    return frozenset().union(*(_cells(properties, marker) for marker in _CELLS_OF))


def _cells(properties: Iterable[tuple[str, object]], marker: str) -> frozenset[Cell]:
    """As pytest_collection_modifyitems left them, in this process or in another."""
    lists = [value for name, value in properties if name == marker]
    return frozenset(Cell(*cell) for cells in lists for cell in cells)  # type: ignore[attr-defined]
