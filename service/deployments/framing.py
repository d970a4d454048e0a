"""How much a request may send around its body: head, chunk sizes and extensions, trailers.

Counts what uvicorn's fast parser, httptools, does not bound. Only uvicorn's other parser, h11,
knows its `h11_max_incomplete_event_size`.
"""

from enum import Enum

import httptools

MAX_HEADER_BYTES = 16 << 10
"""Of a head with its trailers, names and values together."""
MAX_HEADERS = 256
MAX_FRAMING_BYTES = 16 << 10
"""Around a body, whatever it holds; what follows comes on top of it."""
BODY_BYTES_PER_FRAMING_BYTE = 4
_LEAST_CHUNK_BYTES = 5
"""A chunk's size and its two line ends; its content is body."""


class FramingError(httptools.HttpParserError):
    """Raised in a callback of the parser it becomes a HttpParserError of feed_data()."""


class _Part(Enum):
    NONE = "between two requests"
    HEAD = "head"
    BODY = "body"


class FramingBudget:
    """Of one connection; every method may raise FramingError.

    Bytes are counted twice: as the parser hands them over, and as they are read. The first catches
    many small things in one read; the second what the parser gathers before it hands it over, such
    as one endless header, and what it never hands over. What is held of either is bounded by the
    ceilings and one read.
    """

    __slots__ = (
        "_is_alone",
        "_is_read_fresh",
        "_num_chunks",
        "_num_header_bytes",
        "_num_headers",
        "_num_read_bytes",
        "_part",
        "num_body_bytes",
    )

    def __init__(self) -> None:
        self._part = _Part.NONE
        # Whether nothing of an earlier request stands before the part in the read it began in.
        self._is_alone = False
        self._is_read_fresh = True
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_read_bytes = 0
        self._num_chunks = 0
        self.num_body_bytes = 0

    def begin_head(self) -> None:
        self._part = _Part.HEAD
        self._is_alone = self._is_read_fresh
        self._num_headers = self._num_header_bytes = self._num_read_bytes = 0

    def count_header(self, num_bytes: int) -> None:
        """The path, a header or a trailer."""
        self._num_headers += 1
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            raise FramingError("the request's head is too large")

    def begin_body(self) -> None:
        self._part = _Part.BODY
        self._is_alone = False
        self._num_read_bytes = self._num_chunks = self.num_body_bytes = 0

    def count_body(self, num_bytes: int) -> None:
        self.num_body_bytes += num_bytes

    def count_chunk(self) -> None:
        self._num_chunks += 1
        self._check_framing(self._num_chunks * _LEAST_CHUNK_BYTES)

    def end(self) -> None:
        """The request is whole."""
        self._part = _Part.NONE
        self._is_read_fresh = False

    def end_read(self, num_bytes: int) -> None:
        """After the parser has had a read of so many bytes."""
        is_alone, self._is_alone, self._is_read_fresh = self._is_alone, True, True
        if self._part is _Part.HEAD and is_alone:
            self._num_read_bytes += num_bytes
            if self._num_read_bytes > MAX_HEADER_BYTES:
                raise FramingError("the request's head is too large")
        elif self._part is _Part.BODY:
            self._num_read_bytes += num_bytes if is_alone else self.num_body_bytes
            self._check_framing(self._num_read_bytes - self.num_body_bytes)

    def _check_framing(self, num_bytes: int) -> None:
        allowed = MAX_FRAMING_BYTES + self.num_body_bytes // BODY_BYTES_PER_FRAMING_BYTE
        if num_bytes > allowed:
            raise FramingError("too much is sent around the request's body")
