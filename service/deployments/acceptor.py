"""Accepts the connections of one HTTP server: within its ceiling, and past no handshake's time.

asyncio's own servers accept whatever comes, thousands in one turn of the loop, and count nobody
whose TLS handshake is under way. Knows no HTTP.
"""

import asyncio
import ctypes
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from service.deployments.connection_table import ConnectionTable
from service.deployments.wire_answers import RefusingProtocol

BACKLOG = 2048
MAX_ACCEPTED_PER_TURN = 32
MAX_OPEN_REFUSALS = 256
"""Refused clients that are told why; more at once are only closed."""
_RETRY_S = 0.2
_SHUTDOWN_TIMEOUT_S = 5.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


class _Handshake:
    """A Guest: a TLS connection before its handshake has ended."""

    def __init__(self, task: "asyncio.Task[None] | None") -> None:
        self._task = task

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Acceptor:
    """From start() to stop() or close(). ssl_context: None accepts plain connections.

    make_protocol: of one connection, which enters and leaves `table` itself.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        table: ConnectionTable,
        ssl_context: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._make_protocol = make_protocol
        self._table = table
        self.ssl_context = ssl_context
        self._handshake_timeout_s = handshake_timeout_s
        self._listener: socket.socket | None = None
        self._refusals: set[RefusingProtocol] = set()
        self._arriving: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        """listener: bound and not blocking; it belongs to the acceptor from now on."""
        listener.listen(BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def stop(self) -> None:
        """Listen no more. Harmless if it does not listen.

        The kernel resets connections that wait in the queue of a socket when it is closed, so they
        are taken out of it first.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener)
        waiting = _accept_all(listener)
        listener.close()
        for connection in waiting:
            self._take(connection)
        # Handshakes have their own time; all others are known to the server when this returns.
        if self.ssl_context is None:
            await asyncio.gather(*self._arriving)

    def close(self) -> None:
        """Listen no more; whoever waits in the queue is reset."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self) -> None:
        if self._listener is None:
            return
        for _ in range(MAX_ACCEPTED_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(self._listener, error)
                return
            connection.setblocking(False)
            self._take(connection)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        # The kernel would report the listener as ready all the time.
        logger.error("no connection can be accepted: %s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _take(self, connection: socket.socket) -> None:
        if self._table.make_room():
            if self.ssl_context is None:
                self._spawn(self._establish(self._make_protocol, connection))
            else:
                self._spawn(self._shake_hands(connection, self.ssl_context))
            return
        self._table.cuts["refused, as all connections have requests"] += 1
        # An answer over TLS would cost the handshake that there is no room for.
        if self.ssl_context is not None or len(self._refusals) >= MAX_OPEN_REFUSALS:
            connection.close()
        else:
            self._spawn(self._establish(lambda: RefusingProtocol(self._refusals), connection))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _establish(
        self, make_protocol: Callable[[], asyncio.Protocol], connection: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError as error:
            logger.debug("a connection ended at once: %s", error)

    async def _shake_hands(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        guest = _Handshake(asyncio.current_task())
        self._table.enter(guest)
        try:
            await loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:
            logger.debug("no TLS connection came about: %s", error)
        finally:
            self._table.leave(guest)


def _accept_all(listener: socket.socket) -> list[socket.socket]:
    """Every connection that waits. Close the listener at once: what comes later is reset.

    socket.accept() gives the interpreter lock away and may get it back milliseconds later, time for
    others to connect. Called with the lock held, the last accept and the close are microseconds
    apart. No client can be kept out of the queue of one of several listeners any earlier.
    """
    accept = ctypes.PyDLL(None, use_errno=True).accept4
    accepted: list[socket.socket] = []
    while True:
        descriptor = accept(
            listener.fileno(), None, None, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        if descriptor >= 0:
            accepted.append(socket.socket(fileno=descriptor))
        elif ctypes.get_errno() not in (errno.ECONNABORTED, errno.EINTR):
            return accepted
