"""The two servers of an ingress: HTTP, unless a proxy of Serve's has that port, and gRPC.

Knows no model and no registry.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
from fastapi import FastAPI

from service.api.grpc import GrpcOptions, build_grpc_server
from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.grpc_doorkeeper import Doorkeeper
from service.api.services import ApiServices
from service.config import ServeConfig
from service.deployments.listeners import HttpServer, bind_shared, host_and_port
from service.deployments.open_files import allow_connections
from service.security.connections import GrpcConnectionLimits, HttpConnectionLimits
from service.security.renewal import Renewable
from service.security.tls import GrpcTls, TlsSettings

T = TypeVar("T")


class FrontDoor:
    """http, rpc: None until open(); http stays None behind a proxy. calls: of rpc. renewables:
    certificates."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.http: HttpServer | None = None
        self.rpc: grpc.aio.Server | None = None
        self.calls = CallsUnderWay()
        self._doorkeeper: Doorkeeper | None = None
        self.renewables: list[Renewable[Any]] = []

    async def open(self, app: FastAPI, services: ApiServices) -> None:
        """Listen on both ports. Raises OSError or RuntimeError if one is taken."""
        http, rpc = self._config.http, self._config.grpc
        http_limits, grpc_limits = _fit(http.connections, rpc.connections)
        if http.proxy == "direct":
            await self._open_http(app, http_limits)
        await self._open_grpc(services, grpc_limits)

    async def _open_grpc(self, services: ApiServices, limits: GrpcConnectionLimits) -> None:
        rpc = self._config.grpc
        renewable = _renewable("grpc.tls", rpc.tls, TlsSettings.load_grpc_certificates)
        tls = None
        if rpc.tls is not None:
            tls = GrpcTls(rpc.tls)
            self.renewables += [one.into(tls.use) for one in renewable]
        options = GrpcOptions(can_share_port=True, connections=limits)
        address = host_and_port(rpc.host, rpc.port)
        self._doorkeeper = Doorkeeper(limits)
        self.rpc = build_grpc_server(
            services, address, options, tls, self._doorkeeper, self.calls
        ).server
        await self.rpc.start()

    async def _open_http(self, app: FastAPI, limits: HttpConnectionLimits) -> None:
        http = self._config.http
        renewable = _renewable("http.tls", http.tls, TlsSettings.to_ssl_context)
        drain_timeout_s = self._config.drain_timeout_s
        server = HttpServer(app, http.keep_alive_timeout_s, drain_timeout_s, http.tls, limits)
        self.renewables += [one.into(server.use_tls) for one in renewable]
        self.http = server
        await server.start(bind_shared(http.host, http.port))

    async def keep(self) -> None:
        """Close connections that stand in others' way, until cancelled. After open()."""
        if self._doorkeeper is None:
            raise RuntimeError("nothing is open that could be kept")
        await self._doorkeeper.run()

    def check_health(self) -> None:
        """Raise if a server has ended that should run."""
        if self.http is not None:
            self.http.check_health()


def _fit(
    http: HttpConnectionLimits, rpc: GrpcConnectionLimits
) -> tuple[HttpConnectionLimits, GrpcConnectionLimits]:
    """Both with the connections that this process may really have, in proportion."""
    wanted = http.max_connections + rpc.max_connections
    room = allow_connections(wanted)
    num_http = max(1, http.max_connections * room // wanted)
    num_rpc = max(1, rpc.max_connections * room // wanted)
    return (
        http.model_copy(update={"max_connections": num_http}),
        rpc.model_copy(update={"max_connections": num_rpc}),
    )


def _renewable(
    name: str, tls: TlsSettings | None, load: Callable[[TlsSettings], T]
) -> list[Renewable[T]]:
    """One, or none without TLS."""
    if tls is None:
        return []
    settings = tls

    def load_checked() -> T:
        settings.check(name)
        return load(settings)

    return [Renewable(name, settings.files, load_checked)]
