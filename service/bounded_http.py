"""uvicorn's HTTP parser with a ceiling on request headers, which the fast parser itself has not.

Only uvicorn's other parser, h11, knows its `h11_max_incomplete_event_size`.
"""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 16 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 and closes when headers are over MAX_HEADER_BYTES, names and values together.

    What is held of a head that never ends is bounded too: by the ceiling and one read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_head = False
        self._num_header_bytes = 0
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_header_bytes = 0
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            # The parser passes it on to uvicorn, which answers 400 and closes.
            raise httptools.HttpParserError("the request's head is too large")
