"""What is shown while a service starts: bars on terminals, a line a second elsewhere."""

import io

import pytest
from rich.console import Console

from service.command.start_display import StartBar, StartLines, make_start_display
from service.deployments.registry import IngressReport, ServiceStatus, StartProgress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def status_of(*starting: StartProgress, num_live=0) -> ServiceStatus:
    ingress = IngressReport("in", is_ready=True, is_draining=True, num_live_requests=num_live)
    return ServiceStatus(1, starting, (ingress,))


def loading(fraction, stage="loading weights"):
    return StartProgress("r1", "builtin", stage, fraction)


@pytest.fixture
def out():
    return io.StringIO()


def lines_after(out, updates):
    clock = Clock()
    with StartLines(Console(file=out), "starting Ray", clock) as lines:
        for seconds, status, state in updates:
            clock.now_s += seconds
            lines.update(status, state)
    return [line.split("s  ", 1)[1] for line in out.getvalue().splitlines()]


def test_a_file_gets_the_share_of_the_weights_once_a_second(out) -> None:
    updates = [(0.25, status_of(loading(step / 20)), "DEPLOYING") for step in range(20)]
    shares = [line for line in lines_after(out, updates) if "weights" in line]
    assert shares[0] == "builtin replica r1: loading weights"
    assert shares[1:] == [f"builtin replica r1: loading weights {n}%" for n in (20, 40, 60, 80)]


def test_a_file_gets_nothing_twice(out) -> None:
    updates = [(2.0, status_of(loading(0.0, "warming up")), "DEPLOYING")] * 5
    assert lines_after(out, updates) == [
        "starting Ray",
        "deploying: deploying",
        "builtin replica r1: warming up",
    ]


def test_draining_counts_requests(out) -> None:
    updates = [(2.0, status_of(num_live=n), "DRAINING") for n in (3, 3, 0)]
    assert lines_after(out, updates)[1:] == ["draining: 3 requests", "draining: 0 requests"]


def test_lines_carry_no_control_characters(out) -> None:
    lines_after(out, [(2.0, status_of(loading(0.5)), "DEPLOYING")])
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, StartBar), (False, StartLines)])
def test_the_console_decides(out, is_terminal, kind) -> None:
    console = Console(file=out, force_terminal=is_terminal)
    assert type(make_start_display(console, "starting")) is kind


def test_a_terminal_shows_replica_and_stage(out) -> None:
    console = Console(file=out, force_terminal=True, width=100)
    with make_start_display(console, "starting Ray") as bar:
        bar.update(status_of(loading(0.5)), "DEPLOYING")
    assert "builtin replica r1: loading weights" in out.getvalue()
