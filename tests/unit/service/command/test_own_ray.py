"""A Ray of our own that is late to start is begun again, and nothing of what failed is left."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
import ray

from service.command.own_ray import start_own_ray

# Starts a process of its own, says so, and stays.
FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(flush=True)
time.sleep(600)
"""
LATE = Exception("The current node timed out during startup.")


class PretendedRay:
    """Each start leaves processes; the first ones fail with what is given for them."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.options: list[dict[str, object]] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.families: list[list[psutil.Process]] = []

    def init(self, **options: object) -> None:
        self.options.append(options)
        process = start_family()
        self.started.append(process)
        parent = psutil.Process(process.pid)
        self.families.append([parent, *parent.children()])
        if self._errors:
            raise self._errors.pop(0)

    def num_alive(self) -> list[int]:
        """Of each start."""
        return [sum(map(psutil.Process.is_running, family)) for family in self.families]

    def end(self) -> None:
        """Whatever has not ended, children whose parents have among it."""
        for process in (process for family in self.families for process in family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self.started:
            started.communicate()


def start_family() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-S", "-c", FAMILY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end_family(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
    process.communicate()


Pretend = Callable[..., PretendedRay]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Puts a Ray in the place of the real one whose first starts fail with these errors."""
    made: list[PretendedRay] = []

    def make(*errors: Exception) -> PretendedRay:
        made.append(PretendedRay(*errors))
        monkeypatch.setattr(ray, "init", made[-1].init)
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_start_that_is_late_is_tried_again_and_leaves_nothing(pretend: Pretend) -> None:
    pretended = pretend(LATE, RuntimeError("no port of the GCS"))
    start_own_ray({"address": "local"})
    assert pretended.options == [{"address": "local"}] * 3
    assert pretended.num_alive() == [0, 0, 2]


def test_what_ran_before_is_left_alone(pretend: Pretend) -> None:
    other = start_family()
    try:
        pretend(LATE)
        start_own_ray({})
        assert other.poll() is None
        assert len(psutil.Process(other.pid).children()) == 1
    finally:
        end_family(other)


def test_one_that_never_starts_is_an_error_that_says_why(pretend: Pretend) -> None:
    pretended = pretend(LATE, LATE, LATE)
    with pytest.raises(RuntimeError, match=r"did not start, 3 times: The current node timed out"):
        start_own_ray({})
    assert pretended.num_alive() == [0, 0, 0]


def test_options_that_ray_refuses_are_not_tried_again(pretend: Pretend) -> None:
    pretended = pretend(ValueError("num_cpus"))
    with pytest.raises(ValueError, match="num_cpus"):
        start_own_ray({})
    assert len(pretended.options) == 1
