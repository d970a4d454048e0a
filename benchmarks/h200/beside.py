"""Engines on several GPUs of one host at once: a lane a GPU, each with its jobs in their order.

    python3 -m benchmarks.h200.beside --log results.jsonl --site vllm=VLLM \\
        --lane 0 tessera:deepseek-v2-lite:brief_512 tessera:gemma-3-12b:brief \\
        --lane 1 vllm:deepseek-v2-lite:brief_512 vllm:gemma-3-12b:brief

A job is ENGINE:MODEL:WORKLOAD, MODEL the name of a config in models/. Lanes share the host's cores
evenly: an engine that compiles takes none of another's. A line a measurement goes to the log and to
stdout as it is done, tables follow. A job that fails or is late ends, and its lane goes on. Exit
status 1 if one did. Rates of lanes compare as far as their GPUs do: exchange the lanes to know.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.h200.compare import print_tables
from benchmarks.h200.engine_job import ENGINES, EngineJob, folder_of
from benchmarks.h200.engine_process import EngineFailedError, run_engine
from benchmarks.h200.measurements import Log
from benchmarks.h200.workloads import WORKLOADS

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Lane:
    """gpu: as CUDA_VISIBLE_DEVICES names it. cores: those that its engines may run on."""

    gpu: str
    cores: frozenset[int]
    jobs: tuple[EngineJob, ...]


class SharedLog:
    """What the lanes measure, one line at a time."""

    def __init__(self, path: Path) -> None:
        self.log = Log(path)
        self.log.read(path)
        self._lock = threading.Lock()

    def add(self, gpu: str, job: EngineJob, row: Mapping[str, float | str]) -> None:
        with self._lock:
            self.log.add(job.config.stem, job.workload, {**row, "gpu": gpu})
            print(json.dumps({"model": job.config.stem, "gpu": gpu, **row}), flush=True)


def job_of(text: str, repeats: int) -> EngineJob:
    """Raises ValueError where text is no job."""
    engine, _, rest = text.partition(":")
    model, _, workload = rest.partition(":")
    config = MODELS / f"{model}.json"
    if engine not in ENGINES or workload not in WORKLOADS or not config.is_file():
        raise ValueError(f"{text!r} is no ENGINE:MODEL:WORKLOAD")
    return EngineJob(engine, config, workload, repeats)


def shares_of(cores: Iterable[int], number: int) -> list[frozenset[int]]:
    """Equally many cores for each of a number of lanes; all of them where there are too few."""
    ordered = sorted(cores)
    size = len(ordered) // number
    if size == 0:
        return [frozenset(ordered)] * number
    return [frozenset(ordered[i * size : (i + 1) * size]) for i in range(number)]


def lanes_of(given: Sequence[Sequence[str]], repeats: int) -> list[Lane]:
    """given: of each lane its GPU and its jobs. Raises ValueError."""
    shares = shares_of(os.sched_getaffinity(0), len(given))
    return [
        Lane(gpu, cores, tuple(job_of(job, repeats) for job in jobs))
        for (gpu, *jobs), cores in zip(given, shares, strict=True)
    ]


def run_lane(lane: Lane, sites: Mapping[str, str], timeout_s: float, log: SharedLog) -> int:
    """How many of its jobs failed."""
    # Of this thread alone, and of the processes that it starts.
    os.sched_setaffinity(0, lane.cores)
    num_failed = 0
    for job in lane.jobs:
        environment = {**job.environment(sites), "CUDA_VISIBLE_DEVICES": lane.gpu}
        start_s = time.monotonic()
        try:
            for row in run_engine(job.command(), environment, folder_of(job.engine), timeout_s):
                log.add(lane.gpu, job, row)
        except EngineFailedError as error:
            num_failed += 1
            print(f"{job.engine} {job.config.stem}: {error}", file=sys.stderr, flush=True)
        elapsed_s = time.monotonic() - start_s
        print(f"-- {job.engine} {job.config.stem}: {elapsed_s:.0f} s", flush=True)
    return num_failed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--lane", action="append", nargs="+", required=True, metavar="GPU ENGINE:MODEL:WORKLOAD"
    )
    parser.add_argument("--site", action="append", default=[], metavar="NAME=PYTHONPATH")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each job")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, appended to")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    sites = dict(entry.split("=", 1) for entry in arguments.site)
    try:
        lanes = lanes_of(arguments.lane, arguments.repeats)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    jobs = [job for lane in lanes for job in lane.jobs]
    without = {job.engine for job in jobs} - {"tessera", *sites}
    if without:
        print(f"--site is missing for {', '.join(sorted(without))}", file=sys.stderr)
        return 2
    log = SharedLog(arguments.log)
    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [pool.submit(run_lane, lane, sites, arguments.timeout_s, log) for lane in lanes]
        num_failed = sum(run.result() for run in runs)
    for model in dict.fromkeys(job.config.stem for job in jobs):
        print_tables(log.log, model)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
