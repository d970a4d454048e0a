"""For pytest: notes the cells of each test in its report, and writes what a run proved.

--proofs-to FOLDER adds the run's results to the committed ones and writes both to FOLDER, as
tests/gpu/attention/results has them. --proofs-collected FILE writes, as JSON, which tests prove
what: node id to [[backend, what], ...]. Works over the processes of pytest-xdist.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.proofs.cells import MARKER, Cell, cells_of
from tests.proofs.results import (
    GpuResults,
    RunProofs,
    installed_packages,
    merge_results,
    read_results,
    write_results,
)

COMMITTED = Path(__file__).parents[1] / "gpu" / "attention" / "results"
_PROOFS = pytest.StashKey[RunProofs]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs")
    group.addoption("--proofs-to", type=Path, help="folder for what this run proves on its GPU")
    group.addoption("--proofs-collected", type=Path, help="file for what collected tests prove")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = RunProofs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before a run's report is made, whose properties go from process to process."""
    for item in items:
        cells = sorted(cells_of(item))
        if cells:
            item.user_properties.append((MARKER, [list(cell) for cell in cells]))


def pytest_collection_finish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("proofs_collected")
    if path is not None:
        collected = {item.nodeid: _cells(item.user_properties) for item in session.items}
        proving = {name: sorted(cells) for name, cells in collected.items() if cells}
        path.write_text(json.dumps(proving), encoding="utf-8")


class _Recorder:
    """In the one process that hears of every test."""

    def __init__(self, proofs: RunProofs) -> None:
        self._proofs = proofs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cells = _cells(report.user_properties)
        if cells and (report.failed or (report.when == "call" and report.passed)):
            self._proofs.count(cells, has_passed=report.passed)


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
    backends = session.config.stash[_PROOFS].by_backend(today, installed_packages())
    run = GpuResults(torch.cuda.get_device_name(0), f"sm{major}{minor}", backends)
    older = {results.gpu: results for results in read_results(COMMITTED)}
    path = write_results(folder, merge_results(older.get(run.gpu), run))
    print(f"\n{sum(len(r.passed) for r in backends.values())} cells passed: {path}")


def _cells(properties: Iterable[tuple[str, object]]) -> frozenset[Cell]:
    """As pytest_collection_modifyitems left them, in this process or in another."""
    lists = [value for name, value in properties if name == MARKER]
    return frozenset(Cell(*cell) for cells in lists for cell in cells)  # type: ignore[attr-defined]
