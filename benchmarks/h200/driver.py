"""What the drivers of all engines have in common: their command line and their output.

A driver is a script that takes these arguments, builds its engine, and calls measure. Output is one
JSON object a measurement, as it is done: engine, repeat, startup_s and everything measured in this
repeat so far, by the names of workloads.py. Imports workloads.py alone, so that it runs beside any
engine's packages.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.h200.workloads import (
    PREFIX_CACHED,
    VOCAB_SIZE,
    WORKLOADS,
    Generate,
    WorkloadRunner,
)

MAX_CONTEXT_LEN = 8192
MEMORY_FRACTION = 0.85
MAX_RUNNING_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Job:
    """What a driver is to do. config: a Hugging Face config.json, under any name. tp_size: GPUs
    that share the model; ep_size: into so many parts of these a mixture's experts are divided."""

    config: Path
    workload: str
    repeats: int
    tp_size: int
    ep_size: int = 1

    @property
    def has_prefix_cache(self) -> bool:
        return self.workload in PREFIX_CACHED

    @contextmanager
    def model_folder(self) -> Iterator[str]:
        """A folder with nothing but the config, while the engine is loaded from it."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(self.config, Path(folder) / "config.json")
            yield folder


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--workload", choices=WORKLOADS, default="full")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--ep", type=int, default=1, help="parts of the GPUs that own experts")
    return parser


def job_of(arguments: argparse.Namespace) -> Job:
    return Job(arguments.config, arguments.workload, arguments.repeats, arguments.tp, arguments.ep)


def measure(
    engine: str,
    job: Job,
    generate: Generate,
    started_s: float,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Warm up, then run and print the job's workloads. started_s: time.perf_counter at the start.

    The engine must be ready to take requests: its start to ready is what the first line says.
    settle: what the engine does by itself while no request comes, such as capturing graphs;
    settled_s says when it was done. What a repeat's steps leave to be done is no part of the next.
    """
    start: dict[str, float | str] = {"startup_s": round(time.perf_counter() - started_s, 2)}
    settle()
    start["settled_s"] = round(time.perf_counter() - started_s, 2)
    _print({"engine": engine, "repeat": 0, **start})
    runner = WorkloadRunner(generate, VOCAB_SIZE)
    workloads = WORKLOADS[job.workload]
    runner.warm_up(workloads)
    for repeat in range(job.repeats):
        row: dict[str, float | str] = {"engine": engine, "repeat": repeat, **start}
        settle()
        for workload in workloads:
            for name, value in runner.rows(workload):
                row[name] = value
                _print(row)


def _print(row: dict[str, float | str]) -> None:
    print(json.dumps(row), flush=True)
