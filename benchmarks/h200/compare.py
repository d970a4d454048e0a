"""Tessera beside its peers on the same GPUs: engine by engine, each in a process of its own.

    python3 -m benchmarks.h200.compare benchmarks/h200/models/llama-3.1-8b.json \\
        --engines tessera vllm sglang --site vllm=SITE --site sglang=SITE --log results.jsonl

SITE becomes the PYTHONPATH of a peer's driver, peers/run_NAME.py; Tessera runs with ours. The log
grows by a line a measurement, as it is done; a later call that names the same log, or --merge with
another one, adds its engines to the tables. --engines without a name prints the tables alone.
A table shows the best of an engine's repeats, and a second one their median and spread; a ratio
above 1 says that Tessera is ahead. Exit status 1 if an engine failed.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.h200.engine_job import ENGINES, EngineJob, folder_of, title_of
from benchmarks.h200.engine_process import EngineFailedError, run_engine
from benchmarks.h200.measurements import Log, is_prefix_workload, lead_table, spread_table
from benchmarks.h200.workloads import WORKLOADS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["tessera"])
    parser.add_argument("--site", action="append", default=[], metavar="NAME=PYTHONPATH")
    parser.add_argument("--workload", choices=WORKLOADS, default="full")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--ep", type=int, default=1, help="parts of the GPUs that own experts")
    parser.add_argument("--backend", default=None, help="Tessera's attention backend")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each engine")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--merge", type=Path, action="append", default=[], metavar="LOG")
    return parser.parse_args()


def run_all(
    arguments: argparse.Namespace, sites: dict[str, str], model: str, log: Log
) -> list[str]:
    """Names of the engines that failed; what they had measured before is in the log. model: as the
    log names it."""
    failed = []
    for name in arguments.engines:
        job = EngineJob(
            name,
            arguments.config,
            arguments.workload,
            arguments.repeats,
            arguments.tp,
            arguments.backend,
            arguments.ep,
        )
        command, environment = job.command(), job.environment(sites)
        try:
            for row in run_engine(command, environment, folder_of(name), arguments.timeout_s):
                log.add(model, arguments.workload, row)
        except EngineFailedError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return failed


def print_tables(log: Log, model: str) -> None:
    for workload in log.workloads(model):
        samples = log.samples(model, workload)
        kind = "prefix cache on" if is_prefix_workload(workload) else "prefix cache off"
        print(f"\n{model}, {workload} workload, {kind}\n")
        print(lead_table(samples))
        print(f"\nmedian of the repeats (spread)\n\n{spread_table(samples)}")


def main() -> int:
    arguments = parse_arguments()
    sites = dict(entry.split("=", 1) for entry in arguments.site)
    without = [name for name in arguments.engines if name != "tessera" and name not in sites]
    if without:
        print(f"--site is missing for {', '.join(without)}", file=sys.stderr)
        return 2
    log = Log(arguments.log)
    for path in (*arguments.merge, arguments.log):
        log.read(path)
    model = title_of(arguments.config, arguments.tp, arguments.ep)
    failed = run_all(arguments, sites, model, log)
    print_tables(log, model)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
