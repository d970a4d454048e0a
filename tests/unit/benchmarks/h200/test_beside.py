"""beside.py: lanes at once, each in its order, on cores of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.h200.beside import job_of, lanes_of, shares_of
from tests.unit.benchmarks.h200.test_compare import BROKEN, ROOT, SGLANG, VLLM, site

MODEL = "gemma-3-12b"


def beside(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    log = "--log", str(folder / "log.jsonl")
    command = [sys.executable, "-m", "benchmarks.h200.beside", *log, *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def of_any_config(code: str) -> str:
    return code.replace(' == "{}"', "")


def test_lanes_run_their_jobs_and_one_table_has_them_all(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", of_any_config(VLLM))
    sites += "--site", site(tmp_path, "sglang", of_any_config(SGLANG))
    lanes = "--lane", "0", f"vllm:{MODEL}:brief", "--lane", "1", f"sglang:{MODEL}:brief"
    done = beside(tmp_path, *sites, *lanes)
    assert done.returncode == 0, done.stderr
    assert "| workload | tessera |" in done.stdout
    assert "256 requests" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {(row["engine"], row["gpu"]) for row in rows} == {("vllm", "0"), ("sglang", "1")}
    assert {row["workload"] for row in rows} == {"brief"}


def test_a_job_that_fails_leaves_its_lane_to_the_next(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", BROKEN)
    sites += "--site", site(tmp_path, "sglang", of_any_config(SGLANG))
    done = beside(tmp_path, *sites, "--lane", "0", f"vllm:{MODEL}:brief", f"sglang:{MODEL}:brief")
    assert done.returncode == 1
    assert "exit status" in done.stderr
    assert '"engine": "sglang"' in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("text", ["vllm", "other:gemma-3-12b:brief", "vllm:none:brief", "a:b:c"])
def test_what_is_no_job_is_said(text) -> None:
    with pytest.raises(ValueError, match="ENGINE:MODEL:WORKLOAD"):
        job_of(text, 1)


def test_lanes_have_cores_of_their_own_where_there_are_enough() -> None:
    assert shares_of([3, 1, 2, 0, 4], 2) == [frozenset({0, 1}), frozenset({2, 3})]
    assert shares_of([5], 2) == [frozenset({5})] * 2


def test_a_lane_is_a_gpu_and_its_jobs() -> None:
    (lane,) = lanes_of([["1", f"tessera:{MODEL}:brief", f"vllm:{MODEL}:decode"]], 3)
    assert lane.gpu == "1"
    assert [(job.engine, job.workload, job.repeats) for job in lane.jobs] == [
        ("tessera", "brief", 3),
        ("vllm", "decode", 3),
    ]
