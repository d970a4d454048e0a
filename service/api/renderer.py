"""Renderer: how one protocol writes a generation. Knows none of them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from service.errors import ApiError
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta, Usage


class Renderer(Protocol):
    """Of one generation. Chunks are server-sent events, ready to be written; a body comes in
    pieces, each made when it is asked for."""

    @property
    def wants_usage_per_chunk(self) -> bool: ...

    def first_chunks(self) -> bytes: ...

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes: ...

    def last_chunks(self, usage: Usage) -> bytes:
        """What ends a stream that has not failed."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that has failed."""
        ...

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]: ...
