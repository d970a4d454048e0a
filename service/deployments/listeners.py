"""Sockets that several ingress processes of one node share, and the HTTP server on one of them.

SO_REUSEPORT: the kernel spreads new connections over all processes that listen. Knows no route.
"""

import asyncio
import logging
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.deployments.acceptor import Acceptor
from service.deployments.bounded_http import BoundedHttpProtocol
from service.deployments.connection_table import ConnectionTable
from service.security.connections import HttpConnectionLimits
from service.security.tls import TlsSettings

logger = logging.getLogger(__name__)

_CHECK_S = 0.5
_LOG_INTERVAL_S = 10.0
_CHECK_WHEN_LEAVING_S = 0.05


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
        limits: HttpConnectionLimits | None = None,
    ) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive_timeout_s,
                timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
                http=HttpToolsProtocol,
                ws="none",
            )
        )
        # It warns of every malformed request; here they are counted.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._limits = limits or HttpConnectionLimits()
        self._table = ConnectionTable(self._limits.max_connections)
        self._acceptor = Acceptor(
            self._make_protocol,
            self._table,
            None if tls is None else tls.to_ssl_context(),
            self._limits.tls_handshake_timeout_s,
        )
        self._task: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._leaving_since_s: float | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve in the background. Raises what ended the server if it does not come up."""
        # uvicorn is given no socket: it would accept without a ceiling.
        self._task = asyncio.create_task(self._server.serve([]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0.01)
        self._acceptor.start(listener)
        self._checking = asyncio.create_task(self._check_connections())

    def check_health(self) -> None:
        """Raise if the server has ended."""
        for task in (self._task, self._checking):
            if task is not None and task.done():
                task.result()
                raise RuntimeError("the HTTP server has ended")

    def use_tls(self, context: ssl.SSLContext) -> None:
        """For every connection that is accepted from now on."""
        self._acceptor.ssl_context = context

    async def stop_accepting(self) -> None:
        """Listen no more; connections that are open are served on, each for one more answer.

        One that brings nothing for LINGER_S is closed: a client that takes a connection out of its
        pool just then would see it break, and this one had not used it for a while. What is half
        sent or unread has no more than LEAVING_TIMEOUT_S.

        Whoever had connected before is served, too: see Acceptor.stop().
        """
        # Of every answer that begins from now on: once a second uvicorn makes the first list anew,
        # from the second.
        close = (b"connection", b"close")
        self._server.server_state.default_headers.append(close)
        self._server.config.encoded_headers.append(close)
        await self._acceptor.stop()
        self._leave()

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def stop(self) -> None:
        """Accept no more, let responses finish within the drain timeout."""
        self._acceptor.close()
        self._leave()
        if self._task is not None:
            self._server.should_exit = True
            await self._task
        if self._checking is not None:
            self._checking.cancel()

    async def stop_within(self, timeout_s: float) -> None:
        """stop(), but responses have so long instead of the drain timeout."""
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_s))
        await self.stop()

    def _leave(self) -> None:
        if self._leaving_since_s is None:
            self._leaving_since_s = asyncio.get_running_loop().time()

    async def _check_connections(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = logged_s = loop.time()
        while True:
            is_leaving = self._leaving_since_s is not None
            await asyncio.sleep(_CHECK_WHEN_LEAVING_S if is_leaving else _CHECK_S)
            now_s = loop.time()
            for connection in self._table:
                if isinstance(connection, BoundedHttpProtocol):
                    connection.check(now_s, now_s - last_s, self._leaving_since_s)
            last_s = now_s
            if self._table.cuts and now_s - logged_s >= _LOG_INTERVAL_S:
                self._log_cuts()
                logged_s = now_s

    def _log_cuts(self) -> None:
        """One line however many there were: an attacker must not fill the log."""
        cuts = self._table.cuts
        reasons = "; ".join(f"{count} {reason}" for reason, count in cuts.most_common())
        logger.warning("HTTP connections that were cut off: %s", reasons)
        cuts.clear()

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn does for the connections that it accepts itself."""
        return BoundedHttpProtocol(
            table=self._table,
            limits=self._limits,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
