"""Sockets that several ingress processes of one node share, and the HTTP server on one of them.

SO_REUSEPORT: the kernel spreads new connections over all processes that listen. Knows no route.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from service.bounded_http import BoundedHttpProtocol
from service.security.tls import TlsSettings

BACKLOG = 2048


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

    async def start(self, listener: socket.socket) -> None:
        """Serve in the background. Raises what ended the server if it does not come up."""
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

    async def stop(self) -> None:
        """Accept no more, let responses finish within the drain timeout."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
