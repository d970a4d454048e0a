"""Any commands on the GPUs of one host at once: lanes of GPUs, each with its jobs in their order.

    python3 -m benchmarks.h200.lanes PLAN.toml [PLAN.toml ...] --out OUT [--set NAME=VALUE ...]

A plan (see plans/) has [values], which --set replaces; [kinds.NAME], each a command and, where it
takes one, the folder that it runs in, its environment and a file that it waits for; and [[lanes]],
each a number of gpus and its jobs, "NAME LIMIT_S KIND ARGUMENT ...". A kind's texts name {values}
and {0}, {1}, ... of the arguments, which may name values, too; {rest} is what is left of those.
Lanes take GPUs in their order, and shares of the cores by their GPUs. OUT/NAME.log has what a job
prints, OUT/jobs.txt a line a job that ended. One that fails or is late ends with all its processes,
and its lane goes on, with the same lane's jobs of the next plan behind its own. Exit status 1 if
one did. SIGTERM ends them all.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.h200.engine_process import end_group
from benchmarks.h200.lane_plan import GpuLane, LaneJob, lanes_of, one_behind_the_other, values_of

WAIT_STEP_S = 0.2
LATE, STOPPED = "late", "stopped"


class Runs:
    """out: the folder of logs, made anew or added to."""

    def __init__(self, out: Path) -> None:
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """Nothing that runs goes on, nothing else begins."""
        self._is_stopped = True
        for process in tuple(self._running):
            end_group(process)

    def run_lane(self, lane: GpuLane) -> int:
        """How many of its jobs failed."""
        # Of this thread alone, and of the processes that it starts.
        os.sched_setaffinity(0, lane.cores)
        gpus = ",".join(str(gpu) for gpu in lane.gpus)
        return sum(not self._run(job, gpus) for job in lane.jobs)

    def _run(self, job: LaneJob, gpus: str) -> bool:
        start_s = time.monotonic()
        while job.needs is not None and not job.needs.exists() and not self._is_stopped:
            if time.monotonic() > start_s + job.limit_s:
                return self._note(job, f"{job.needs} is {LATE}", start_s)
            time.sleep(WAIT_STEP_S)
        start_s = time.monotonic()
        status = STOPPED if self._is_stopped else self._status_of(job, gpus)
        return self._note(job, status, start_s)

    def _status_of(self, job: LaneJob, gpus: str) -> int | str:
        """0 where all went well."""
        environment = {**os.environ, **job.environment, "CUDA_VISIBLE_DEVICES": gpus}
        with (self._out / f"{job.name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    job.command,
                    cwd=job.folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return repr(error)
            self._running.add(process)
            if self._is_stopped:
                end_group(process)
            try:
                return process.wait(job.limit_s)
            except subprocess.TimeoutExpired:
                return LATE
            finally:
                end_group(process)
                self._running.discard(process)

    def _note(self, job: LaneJob, status: int | str, start_s: float) -> bool:
        line = f"{time.strftime('%T')} {job.name} {status} {time.monotonic() - start_s:.0f} s"
        with self._lock, (self._out / "jobs.txt").open("a") as jobs:
            print(line, file=jobs)
        print(line, flush=True)
        return status == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    try:
        plans = [tomllib.loads(plan.read_text()) for plan in options.plans]
        given = values_of(options.set, plans)
        cores = os.sched_getaffinity(0)
        lanes = one_behind_the_other([lanes_of(plan, given, cores) for plan in plans])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    runs = Runs(options.out)
    before = signal.signal(signal.SIGTERM, lambda number, frame: runs.stop())
    try:
        with ThreadPoolExecutor(max(1, len(lanes))) as pool:
            return 1 if sum(pool.map(runs.run_lane, lanes)) else 0
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
