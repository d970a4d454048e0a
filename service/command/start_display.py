"""What an operator sees while a service starts or drains: bars on a terminal, lines in a log.

Knows the service's status and a console. Knows no Ray and no engine.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from service.deployments.registry import ServiceStatus, StartProgress

LINE_PERIOD_S = 1.0


class StartDisplay(Protocol):
    """A context in which update is told, again and again, how far things are."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def update(self, status: ServiceStatus, state: str) -> None:
        """state: the application's, as Serve names it, or DRAINING."""


class StartBar:
    """One bar per replica that is starting, or the number of requests while draining."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._main = self._progress.add_task(title, total=None)
        self._replicas: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def update(self, status: ServiceStatus, state: str) -> None:
        self._progress.update(self._main, description=_headline(status, state))
        for starting in status.starting:
            if starting.replica_id not in self._replicas:
                self._replicas[starting.replica_id] = self._progress.add_task("", total=1.0)
            self._progress.update(
                self._replicas[starting.replica_id],
                description=f"{_subject(starting)}: {starting.stage}",
                completed=starting.fraction,
            )


class StartLines:
    """A plain line for whatever changed, at most one round of lines every LINE_PERIOD_S."""

    def __init__(
        self, console: Console, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._started_s = self._told_s = 0.0
        self._told: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._started_s = self._clock()
        self._told_s = self._started_s - LINE_PERIOD_S
        self._print(self._title)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to take down."""

    def update(self, status: ServiceStatus, state: str) -> None:
        if self._clock() - self._told_s < LINE_PERIOD_S:
            return
        self._told_s = self._clock()
        self._tell("", _headline(status, state))
        for starting in status.starting:
            self._tell(starting.replica_id, _line(starting))

    def _tell(self, subject: str, text: str) -> None:
        if self._told.get(subject) != text:
            self._told[subject] = text
            self._print(text)

    def _print(self, text: str) -> None:
        elapsed_s = self._clock() - self._started_s
        self._console.print(
            f"{elapsed_s:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True
        )


def make_start_display(console: Console, title: str) -> StartDisplay:
    """Bars where the console is a terminal, lines where it is a file or a pipe."""
    return StartBar(console, title) if console.is_terminal else StartLines(console, title)


def _headline(status: ServiceStatus, state: str) -> str:
    if state == "DRAINING":
        return f"draining: {sum(report.num_live_requests for report in status.ingresses)} requests"
    return f"deploying: {state.lower()}"


def _subject(starting: StartProgress) -> str:
    return f"{starting.model} replica {starting.replica_id}"


def _line(starting: StartProgress) -> str:
    text = f"{_subject(starting)}: {starting.stage}"
    return f"{text} {starting.fraction:.0%}" if 0.0 < starting.fraction < 1.0 else text
