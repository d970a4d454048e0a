"""One HTTP connection with ceilings and deadlines, on uvicorn's fast parser.

Whoever sends or reads too slowly, or sends too much around a body, is answered if an answer can
still be understood, and cut off. Knows no route.
"""

import asyncio
from enum import Enum
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.deployments.connection_table import ConnectionTable
from service.deployments.framing import FramingBudget, FramingError
from service.deployments.metered_transport import MeteredTransport
from service.deployments.wire_answers import TOO_SLOW
from service.security.connections import HttpConnectionLimits

MAX_PIPELINED_REQUESTS = 32
"""Requests of one connection that wait for answers to earlier ones."""
ANSWERED_BODY_TIMEOUT_S = 5.0
"""What a client has to send the rest of a body after its answer: it may read only then."""
LINGER_S = 1.0
"""A connection that has been idle for so long is closed once nobody listens any more."""
LEAVING_TIMEOUT_S = 10.0
"""Once nobody listens any more, what is half sent or unread has no more than that."""


class Phase(Enum):
    """What of a request is coming in."""

    IDLE = "nothing"
    HEAD = "head"
    BODY = "body"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to what is too large and 408 to what comes too slowly, and closes.

    A Guest of its table; check() has to be called about once a second.
    """

    def __init__(
        self, *, table: ConnectionTable, limits: HttpConnectionLimits, **options: Any
    ) -> None:
        super().__init__(**options)
        self.transport: MeteredTransport
        self._table = table
        self._limits = limits
        self._framing = FramingBudget()
        self._phase = Phase.IDLE
        # When the phase began; later by what the server itself held it back.
        self._since_s = self.loop.time()
        # Of the request that the application has; self.cycle is of the last one that came in.
        self._active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(MeteredTransport(transport))
        self._table.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.leave(self)
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        try:
            self._framing.end_read(len(data))
        except FramingError as error:
            if not self.transport.is_closing():
                self.send_400_response(str(error))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise FramingError("too many requests wait for their answers")
        self._framing.begin_head()
        self._enter(Phase.HEAD)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._framing.count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framing.count_header(len(name) + len(value))
        if self._phase is Phase.HEAD:  # a trailer never becomes a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self._announces_body:
            # The parser would take the body for another request.
            raise FramingError("a request with a body must not ask for another protocol")
        super().on_headers_complete()
        self._framing.begin_body()
        self._enter(Phase.BODY)

    def on_chunk_header(self) -> None:
        """The parser calls it for every chunk of a body."""
        self._framing.count_chunk()

    def on_body(self, body: bytes) -> None:
        self._framing.count_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framing.end()
        self._enter(Phase.IDLE)
        super().on_message_complete()
        if self._is_answering:
            self._table.become_busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            # An answered body has its time from now on, and so has the next request.
            if self._phase is not Phase.HEAD:
                self._since_s = self.loop.time()
            self._table.become_idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer, if the client can take it for the answer to what it sends, and close."""
        self._table.cuts["sent what is no request, or too large"] += 1
        if self._may_answer:
            super().send_400_response(msg)
        self._end()

    def cut(self) -> None:
        self._end()

    def check(self, now_s: float, passed_s: float, leaving_since_s: float | None) -> None:
        """Cut off what takes too long. passed_s: since the last check.

        leaving_since_s: since when nobody listens any more; everything has less time then.
        """
        limits = self._limits
        timeout_s = limits.write_timeout_s
        if leaving_since_s is not None:
            timeout_s = min(timeout_s, LEAVING_TIMEOUT_S)
        if self.transport.is_unread(now_s, timeout_s, limits.min_bytes_per_s):
            self._table.cuts["left its answer unread"] += 1
            self.transport.abort()
        elif not self.transport.is_closing():
            if self._is_held_back:
                self._since_s += passed_s
            if now_s >= self._end_s(leaving_since_s):
                self._time_out()

    @property
    def _is_answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    @property
    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    @property
    def _may_answer(self) -> bool:
        """Whether what is written now is the answer to the request that is coming in."""
        if self._phase is Phase.BODY:
            return self._active is self.cycle and not self.cycle.response_started
        return not self._is_answering

    @property
    def _is_held_back(self) -> bool:
        """Whether the client waits for the server to take more of its request."""
        if self._phase is Phase.BODY and self.cycle.waiting_for_100_continue:
            return True
        return self.flow.read_paused

    def _end_s(self, leaving_since_s: float | None) -> float:
        limits = self._limits
        if self._phase is Phase.IDLE:
            if self._is_answering:
                return float("inf")
            allowed_s, least_s = float(self.timeout_keep_alive), LINGER_S
        elif self._phase is Phase.HEAD:
            allowed_s, least_s = limits.head_timeout_s, LEAVING_TIMEOUT_S
        elif self._is_answering:
            brought_s = self._framing.num_body_bytes / limits.min_bytes_per_s
            allowed_s, least_s = limits.body_timeout_s + brought_s, LEAVING_TIMEOUT_S
        else:
            allowed_s = least_s = ANSWERED_BODY_TIMEOUT_S
        end_s = self._since_s + allowed_s
        if leaving_since_s is None:
            return end_s
        return min(end_s, max(self._since_s, leaving_since_s) + least_s)

    def _time_out(self) -> None:
        if self._phase is not Phase.IDLE:
            self._table.cuts[f"sent its {self._phase.value} too slowly"] += 1
            if self._may_answer:
                self.transport.write(TOO_SLOW)
        self._end()

    def _end(self) -> None:
        """Nothing more is read or answered; what is written is still sent."""
        self._disconnect()
        self.pipeline.clear()
        self.transport.close()

    def _disconnect(self) -> None:
        """Tell the application that its client has left."""
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since_s = self.loop.time()
