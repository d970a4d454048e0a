"""How many small defects an area's own unit tests find: `make mutation`.

    python -m tests.nightly.mutation [--area NAME ...] [--sample 80 | --all] [--seed 1]

For each area: mutants of its files by mutmut (mutants.py says which count), a random sample of
them, and for each one the unit tests that reach the changed function. A mutant is killed if a test
fails or runs out of time. All of it happens in a temporary copy of the tree. Survivors are printed,
and the command fails below a floor. docs/decisions/0053.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutmut.stats import status_by_exit_code

from tests.nightly.equivalent_mutants import EQUIVALENT
from tests.nightly.mutants import Mutant, counted_mutants, python_files

ROOT = Path(__file__).parents[2]
PARTS = ("attention", "workers", "service", "tests", "docs", "helm", "deploy", "benchmarks")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "Dockerfile", "Makefile")
FLOOR, AREA_FLOOR = 0.90, 0.85
SAMPLE, SEED, NUM_PROCESSES = 80, 1, 2
KILLED = {"killed", "timeout"}
# A test of a mutant may take this long, whatever it takes without.
TEST_TIMEOUT_S = 30
CONFIGURATION = """[mutmut]
source_paths =
    attention
    workers
    service
only_mutate =
    {files}
also_copy =
    {parts}
pytest_add_cli_args =
    -p
    tests.nightly.mutation_plugin
    --hypothesis-profile=mutation
    --timeout={timeout_s}{left_out}
    -p
    no:cacheprovider
pytest_add_cli_args_test_selection =
    {tests}
process_isolation = forkserver
track_dependencies = false
use_git_change_detection = false
timeout_multiplier = 2.0
timeout_constant = 60.0
"""


@dataclass(frozen=True)
class Area:
    """files: globs of what is changed. tests: what is to notice. left_out: of these."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()


UNIT = "tests/unit/service"
AREAS = {
    "router": Area(
        ("service/routing/*.py",), (f"{UNIT}/routing", f"{UNIT}/autoscaling/test_waiting.py")
    ),
    "channel": Area(("service/channel/*.py",), (f"{UNIT}/channel",)),
    "metrics": Area(("service/observability/*.py",), (f"{UNIT}/observability/metrics",)),
    "handler": Area(("service/handler/*.py",), (f"{UNIT}/handler",)),
    # What compares times fails by itself now and then while other mutants run.
    "tokenizer": Area(
        ("service/tokenizer/*.py",),
        (f"{UNIT}/tokenizer",),
        tuple(
            f"{UNIT}/tokenizer/test_pool.py::{test}"
            for test in (
                "test_short_texts_do_not_wait_for_long_ones",
                "test_what_certainly_does_not_fit_is_refused_without_encoding",
                "test_the_event_loop_runs_on_while_a_large_prompt_is_encoded",
            )
        ),
    ),
    # Random traffic takes most of the time, and minutes by way of mutmut's trampolines.
    "scheduler": Area(
        ("workers/scheduler/*.py",),
        ("tests/unit/workers/scheduler",),
        ("tests/unit/workers/scheduler/test_scheduler_properties.py",),
    ),
    "kv_cache": Area(("workers/kv_cache/*.py",), ("tests/unit/workers/kv_cache",)),
}


@dataclass
class Outcome:
    """Of one area. num_mutants: that count; the others are of the sample."""

    area: str
    num_mutants: int
    num_killed: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    num_equivalent: int = 0

    @property
    def num_judged(self) -> int:
        return self.num_killed + len(self.survivors)

    @property
    def share(self) -> float:
        return self.num_killed / self.num_judged

    @property
    def line(self) -> str:
        low, high = wilson_interval(self.num_killed, self.num_judged)
        return (
            f"{self.area:<10}{self.num_mutants:>8}{self.num_judged:>8}{self.num_killed:>8}"
            f"{len(self.survivors):>9}{self.num_equivalent:>11}"
            f"{self.share:>9.1%}  [{low:.1%}, {high:.1%}]"
        )


HEADER = "area       mutants  judged  killed survived equivalent    share  95 % interval"


def wilson_interval(num_hits: int, num_trials: int, z: float = 1.96) -> tuple[float, float]:
    """Of a share: Wilson, 1927."""
    share, spread = num_hits / num_trials, z * z / num_trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_trials + spread / num_trials / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def whole(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Share of all areas' mutants that are killed, each area's taken from its sample, and half the
    width of its 95 % interval."""
    total = sum(one.num_mutants for one in outcomes)
    share = sum(one.num_mutants / total * one.share for one in outcomes)
    variance = sum(
        (one.num_mutants / total) ** 2 * one.share * (1 - one.share) / one.num_judged
        for one in outcomes
    )
    return share, 1.96 * math.sqrt(variance)


def faults(outcomes: Sequence[Outcome]) -> list[str]:
    """What is below its floor."""
    below = [
        f"{one.area}: {one.share:.1%} is below {AREA_FLOOR:.0%}"
        for one in outcomes
        if one.share < AREA_FLOOR
    ]
    share, _ = whole(outcomes)
    return below + ([f"all areas: {share:.1%} is below {FLOOR:.0%}"] if share < FLOOR else [])


def measure(
    name: str, sample: int | None = SAMPLE, seed: int = SEED, num_processes: int = NUM_PROCESSES
) -> Outcome:
    """Judge so many mutants of an area, or all. Raises RuntimeError if mutmut cannot."""
    area = AREAS[name]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder)
        _copy(tree, area)
        files = python_files(tree, area.files)
        mutants = [mutant for path in files for mutant in counted_mutants(tree, path)]
        chosen = mutants
        if sample is not None and sample < len(mutants):
            chosen = random.Random(seed).sample(mutants, sample)
        _run_mutmut(tree, chosen, num_processes)
        return _judge(name, len(mutants), chosen, _statuses(tree, files))


def _copy(tree: Path, area: Area) -> None:
    skipped = shutil.ignore_patterns("__pycache__", ".*")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=skipped)
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    join = "\n    ".join
    (tree / "setup.cfg").write_text(
        CONFIGURATION.format(
            files=join(area.files),
            parts=join((*PARTS[3:], *FILES)),
            tests=join(area.tests),
            timeout_s=TEST_TIMEOUT_S,
            left_out="".join(f"\n    --deselect={test}" for test in area.left_out),
        )
    )


def _run_mutmut(tree: Path, chosen: Sequence[Mutant], num_processes: int) -> None:
    names = [mutant.name for mutant in chosen]
    functions = {name.rpartition("__mutmut_")[0] for name in names}
    (tree / "judged.json").write_text(json.dumps(sorted(functions)))
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", "run"]
    # Processes that tests start have to import the mutants, too. Python looks once whether a folder
    # of its path is there.
    mutated = tree / "mutants"
    mutated.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(mutated), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--max-children", str(num_processes), *names],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = re.sub(r"(\S Running \w+( \w+)?\s*)+", "", done.stdout)
        raise RuntimeError(f"mutmut failed:\n{said[-5000:]}\n{done.stderr[-5000:]}")


def _statuses(tree: Path, files: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in files:
        meta = tree / "mutants" / f"{path}.meta"
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            found[name] = status_by_exit_code[code]
    return found


def _judge(
    area: str, num_mutants: int, chosen: Sequence[Mutant], statuses: dict[str, str]
) -> Outcome:
    outcome = Outcome(area, num_mutants)
    for mutant in chosen:
        status = statuses[mutant.name]
        if status in KILLED:
            outcome.num_killed += 1
        elif status not in {"survived", "no tests"}:
            raise RuntimeError(f"{mutant.name} was not judged: {status}")
        elif (mutant.path, *mutant.change) in EQUIVALENT:
            outcome.num_equivalent += 1
        else:
            outcome.survivors.append(mutant)
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.mutation")
    parser.add_argument("--area", action="append", choices=list(AREAS))
    parser.add_argument("--sample", type=int, default=SAMPLE, help="mutants of an area")
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=NUM_PROCESSES)
    given = parser.parse_args(arguments)
    # Whatever ends the command, the copy is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    outcomes = []
    for name in given.area or AREAS:
        sample = None if given.all else given.sample
        outcome = measure(name, sample, given.seed, given.processes)
        outcomes.append(outcome)
        for survivor in outcome.survivors:
            print(survivor.diff, end="\n\n")
        print(f"{HEADER}\n{outcome.line}\n", flush=True)
    share, half = whole(outcomes)
    print(f"seed {given.seed}", HEADER, *(one.line for one in outcomes), sep="\n")
    print(f"all areas: {share:.1%} ± {half:.1%} (floor {FLOOR:.0%}, an area's {AREA_FLOOR:.0%})")
    below = faults(outcomes)
    print(*below, sep="\n")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
