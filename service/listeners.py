"""Sockets that several ingress processes of one node share, and the HTTP server on one of them.

SO_REUSEPORT: the kernel spreads new connections over all processes that listen. Knows no route.
"""

import asyncio
import ctypes
import errno
import socket
import time

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.bounded_http import BoundedHttpProtocol
from service.security.tls import TlsSettings

BACKLOG = 2048
LINGER_S = 1.0
"""A connection that has been idle for so long is closed once nobody listens any more."""
_SWEEP_S = 0.05


def bind_shared(host: str, port: int) -> socket.socket:
    """A TCP socket that other processes of this user may bind too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def host_and_port(host: str, port: int) -> str:
    """As in URLs and gRPC addresses: a numeric IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Raise OSError unless nobody listens there, processes of this user that share included."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


class HttpServer:
    """One uvicorn server on a shared socket, on the caller's event loop. Runs no lifespan.

    tls: None speaks plain HTTP; settings must have passed TlsSettings.check().
    """

    def __init__(
        self,
        app: ASGIApp,
        keep_alive_timeout_s: int,
        drain_timeout_s: float,
        tls: TlsSettings | None = None,
    ) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=keep_alive_timeout_s,
                timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
                http=BoundedHttpProtocol,
                **({} if tls is None else tls.to_uvicorn_options()),
            )
        )
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve in the background. Raises what ended the server if it does not come up."""
        self._listener = listener
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0.01)

    def check_health(self) -> None:
        """Raise if the server has ended."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server has ended")

    async def stop_accepting(self) -> None:
        """Listen no more; connections that are open are served on, each for one more answer.

        One that brings nothing for LINGER_S is closed: a client that takes a connection out of its
        pool just then would see it break, and this one had not used it for a while.

        Whoever had connected before is served, too: the kernel resets connections that wait in the
        queue of a socket when it is closed, so they are taken out of it first.
        """
        if self._listener is None:
            return
        # Of every answer that begins from now on: once a second uvicorn makes the first list anew,
        # from the second.
        close = (b"connection", b"close")
        self._server.server_state.default_headers.append(close)
        self._server.config.encoded_headers.append(close)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        # Connections that the event loop has just accepted need the server to be open still.
        await asyncio.sleep(0)
        waiting = _accept_all(self._listener)
        for server in self._server.servers:
            server.close()
        self._listener = None
        for connection in waiting:
            await loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._server.config.ssl
            )
        self._sweeping = asyncio.create_task(self._close_idle_connections())

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def stop(self) -> None:
        """Accept no more, let responses finish within the drain timeout."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._task is not None:
            self._server.should_exit = True
            await self._task

    async def stop_within(self, timeout_s: float) -> None:
        """stop(), but responses have so long instead of the drain timeout."""
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_s))
        await self.stop()

    async def _close_idle_connections(self) -> None:
        idle_since_s: dict[HttpToolsProtocol, float] = {}
        while True:
            now_s = time.monotonic()
            idle = [one for one in self._http_connections() if _is_idle(one)]
            idle_since_s = {one: idle_since_s.get(one, now_s) for one in idle}
            for connection, since_s in idle_since_s.items():
                if now_s - since_s >= LINGER_S:
                    connection.shutdown()
            await asyncio.sleep(_SWEEP_S)

    def _http_connections(self) -> list[HttpToolsProtocol]:
        connections = self._server.server_state.connections
        return [one for one in connections if isinstance(one, HttpToolsProtocol)]

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn does for the connections that it accepts itself."""
        return BoundedHttpProtocol(
            config=self._server.config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )


def _is_idle(connection: HttpToolsProtocol) -> bool:
    cycle: RequestResponseCycle | None = connection.cycle
    return cycle is None or cycle.response_complete


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
