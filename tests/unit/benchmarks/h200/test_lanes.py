"""lanes.py: commands lane by lane, each within its limit, with GPUs and cores of its own."""

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.h200.lane_plan import GpuLane, Kind, job_of, lanes_of, one_behind_the_other
from benchmarks.h200.lanes import main
from tests.unit.benchmarks.h200.test_compare import ROOT

PLAN = """
[values]
word = "plain"
folder = "."

[kinds.say]
command = "printf [%s] {word} {0} {rest}"

[kinds.gpus]
command = "printenv CUDA_VISIBLE_DEVICES TOLD"
environment = { TOLD = "{0} told" }

[kinds.sleep]
command = "sleep {0}"

[kinds.later]
command = "echo came"
needs = "{folder}/there"

[kinds.make]
command = "touch {0}"
folder = "{folder}"

[kinds.missing]
command = "no-such-command"

"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, list[list[str]]]]:
    """The exit status of a plan's lanes, and the words of jobs.txt."""

    def run_lanes(lanes: str, *options: str) -> tuple[int, list[list[str]]]:
        (tmp_path / "plan.toml").write_text(PLAN + lanes)
        given = "--set", f"folder={tmp_path}", "--out", str(tmp_path / "out")
        status = main([str(tmp_path / "plan.toml"), *given, *options])
        told = tmp_path / "out" / "jobs.txt"
        return status, [line.split() for line in told.read_text().splitlines()]

    return run_lanes


def test_lanes_have_gpus_of_their_own_and_jobs_their_arguments(run, tmp_path: Path) -> None:
    lanes = """
    [[lanes]]
    gpus = 2
    jobs = ["one 30 say first 'two words'", "its 30 gpus {word}"]
    [[lanes]]
    gpus = 1
    jobs = ["two 30 gpus is"]
    """
    status, jobs = run(lanes, "--set", "word=other")
    assert status == 0
    codes = {name: code for _, name, code, *_ in jobs}
    assert codes == {"one": "0", "its": "0", "two": "0"}
    logs = {name: (tmp_path / "out" / f"{name}.log").read_text() for name in codes}
    assert logs == {
        "one": "[other][first][two words]",
        "its": "0,1\nother told\n",
        "two": "2\nis told\n",
    }


def test_a_job_that_fails_is_late_or_cannot_start_costs_its_lane_nothing_else(run) -> None:
    jobs = '"late 0.3 sleep 60", "no 30 missing", "wrong 30 sleep x", "good 30 sleep 0"'
    start_s = time.monotonic()
    status, told = run(f"[[lanes]]\ngpus = 1\njobs = [{jobs}]")
    assert status == 1
    assert time.monotonic() - start_s < 40
    codes = {name: code for _, name, code, *_ in told}
    assert list(codes) == ["late", "no", "wrong", "good"]
    assert codes["late"] == "late"
    assert codes["no"].startswith("FileNotFoundError")
    assert codes["wrong"] != "0"
    assert codes["good"] == "0"


def test_a_job_waits_for_what_it_needs_as_long_as_its_limit(run) -> None:
    lanes = """
    [[lanes]]
    gpus = 1
    jobs = ["too_late 0.3 later", "make 30 make there", "came 30 later"]
    """
    status, told = run(lanes)
    assert status == 1
    assert [(line[1], line[-3]) for line in told] == [
        ("too_late", "late"),
        ("make", "0"),
        ("came", "0"),
    ]


def test_a_signal_to_end_ends_every_job(tmp_path: Path) -> None:
    jobs = '[[lanes]]\ngpus = 1\njobs = ["one 300 sleep 300", "two 300 sleep 300"]'
    (tmp_path / "plan.toml").write_text(PLAN + jobs)
    command = [sys.executable, "-m", "benchmarks.h200.lanes", str(tmp_path / "plan.toml")]
    lanes = subprocess.Popen([*command, "--out", str(tmp_path / "out")], cwd=ROOT)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "out" / "one.log").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    lanes.terminate()
    assert lanes.wait(60) == 1
    told = (tmp_path / "out" / "jobs.txt").read_text().splitlines()
    assert [line.split()[1:3] for line in told] == [["one", "-9"], ["two", "stopped"]]


def test_cores_are_shared_by_gpus() -> None:
    plan = {
        "kinds": {"say": {"command": "echo"}},
        "lanes": [{"gpus": 1, "jobs": ["a 1 say"]}, {"gpus": 3, "jobs": ["b 1 say"]}],
    }
    lanes = lanes_of(plan, {}, range(8))
    assert [(lane.gpus, sorted(lane.cores)) for lane in lanes] == [
        ((0,), [0, 1]),
        ((1, 2, 3), [2, 3, 4, 5, 6, 7]),
    ]
    assert [sorted(lane.cores) for lane in lanes_of(plan, {}, range(2))] == [[0], [1]]


@pytest.mark.parametrize(
    "line",
    ["name", "name soon say", "name 3 shout", "name 3 say", "name 3 say {unknown}"]
    + ["a/name 3 say x", "name nan say x", "name inf say x", "name 0 say x"],
)
def test_what_is_no_job_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(ValueError, match="is no NAME LIMIT_S KIND"):
        job_of(line, {"say": Kind("echo {0}")}, {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lane": []}, "a plan has no lane"),
        ({"kinds": {"say": {"order": "echo"}}}, "not a plan"),
        ({"kinds": ["say"]}, "not a plan"),
        ({"lanes": [{"gpus": 1}]}, "not a plan"),
        ({"lanes": [{"gpus": 0, "jobs": []}]}, "a lane has one GPU or more, not 0"),
        ({"lanes": [{"gpus": "1", "jobs": []}]}, "a lane has one GPU or more, not '1'"),
        ({"lanes": [{"gpus": 1, "jobs": [], "job": []}]}, "a lane has no job"),
    ],
)
def test_what_is_no_plan_is_refused(changes, reason: str) -> None:
    plan = {"kinds": {"say": {"command": "echo"}}, "lanes": [], **changes}
    with pytest.raises(ValueError, match=reason):
        lanes_of(plan, {}, {0})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [("wrod=x", "no plan has a value wrod"), ("word", "'word' is no NAME=VALUE")],
)
def test_a_value_that_no_plan_has_is_refused(
    entry: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.toml").write_text(PLAN + "lanes = []")
    out = tmp_path / "out"
    assert main([str(tmp_path / "plan.toml"), "--out", str(out), "--set", entry]) == 2
    assert reason in capsys.readouterr().err
    assert not out.exists()


def test_plans_of_one_run_go_on_lane_by_lane() -> None:
    def lanes(*jobs: str, gpus: int = 1) -> list[GpuLane]:
        kinds = {"say": {"command": "echo"}}
        return lanes_of({"kinds": kinds, "lanes": [{"gpus": gpus, "jobs": jobs}]}, {}, {0})

    (lane,) = one_behind_the_other([lanes("a 1 say"), lanes("b 1 say", "c 1 say")])
    assert [job.name for job in lane.jobs] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="one log"):
        one_behind_the_other([lanes("a 1 say"), lanes("a 1 say")])
    with pytest.raises(ValueError, match="alike"):
        one_behind_the_other([lanes("a 1 say"), lanes("b 1 say", gpus=2)])


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/h200/plans").glob("*.toml")), ids=str)
def test_the_plans_are_plans_of_files_that_are_there(path: Path) -> None:
    lanes = lanes_of(tomllib.loads(path.read_text()), {}, os.sched_getaffinity(0))
    assert sum(len(lane.gpus) for lane in lanes) == 4
    for job in (job for lane in lanes for job in lane.jobs):
        named = [word for word in job.command if word.startswith(("benchmarks/", "tests/"))]
        modules = [
            word for word in job.command if word.startswith(("benchmarks.", "workers.", "tests."))
        ]
        named += [module.replace(".", "/") + ".py" for module in modules]
        assert named
        assert all((ROOT / name).exists() for name in named), named
