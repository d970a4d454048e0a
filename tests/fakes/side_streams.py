"""Side streams without a device."""

from collections.abc import Iterator
from contextlib import contextmanager


class EagerSide:
    """A SideStream whose launches run at once, and what happened in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def forked(self) -> Iterator[None]:
        self.events.append("fork")
        yield

    def join(self) -> None:
        self.events.append("join")
