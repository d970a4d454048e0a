"""What an operator sees of a fetch: a bar on a terminal, lines in a log."""

import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from service.hub.progress import SteadyProgress

LINE_PERIOD_S = 10.0


class FetchDisplay(Protocol):
    """A context in which update is told, from any thread, how many bytes there are."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def update(self, bytes_done: int, bytes_total: int) -> None: ...


class FetchBar:
    """A bar with bytes, speed and the time that is left."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def update(self, bytes_done: int, bytes_total: int) -> None:
        self._progress.update(self._task, completed=bytes_done, total=bytes_total)


class FetchLines:
    """A line at the beginning, one every LINE_PERIOD_S, one at the end."""

    def __init__(
        self, console: Console, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._steady = SteadyProgress(self._print, clock, LINE_PERIOD_S)

    def __enter__(self) -> Self:
        self._console.print(self._title, highlight=False, markup=False, soft_wrap=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to take down."""

    def update(self, bytes_done: int, bytes_total: int) -> None:
        self._steady(bytes_done, bytes_total)

    def _print(self, bytes_done: int, bytes_total: int) -> None:
        line = f"{bytes_done / bytes_total:4.0%} of {bytes_total / 1e9:.2f} GB"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_fetch_display(console: Console, title: str) -> FetchDisplay:
    """A bar where the console is a terminal, lines where it is a file or a pipe."""
    return FetchBar(console, title) if console.is_terminal else FetchLines(console, title)
