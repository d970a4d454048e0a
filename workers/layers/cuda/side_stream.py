"""A second stream for launches that nothing behind them on the first one needs at once.

A launch that may begin before its predecessor ends (launch.py) knows its own stream's alone: the
first one behind a fork, and the first behind a join, are ordinary ones, or follow an ordinary one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch


class SideStream(Protocol):
    def forked(self) -> AbstractContextManager[None]:
        """What is launched within follows all that was launched before, and runs beside all that is
        launched later, up to join."""

    def join(self) -> None:
        """What is launched from here on follows all of it."""


@dataclass(frozen=True, slots=True)
class CudaSideStream:
    """Within a captured step, too: forks and joins are events, which become a graph's edges."""

    stream: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> "CudaSideStream":
        # Before blocks of what runs beside that wait for a place: launches here follow each other.
        return cls(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]

    @contextmanager
    def forked(self) -> Iterator[None]:
        self.stream.wait_stream(self._main)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        self._main.wait_stream(self.stream)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.stream.device)


@contextmanager
def joined(side: SideStream) -> Iterator[None]:
    """What is launched behind it follows side, also where something raises within it."""
    try:
        yield
    except BaseException:
        # A capture that is lost cannot be joined either: what lost it is told.
        with suppress(RuntimeError):
            side.join()
        raise
    side.join()
