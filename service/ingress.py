"""Ingress: the Serve deployment that clients talk to. HTTP and gRPC in front, channels behind.

Composes handler, router and API servers in one process and keeps them informed by the registry. A
token passes no Ray code here: it comes from a channel and leaves through a socket of this process
(or, for HTTP, through the proxy that the configuration asks for).
"""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from service.admission import AdmissionControl
from service.api.auth import make_authenticator
from service.api.grpc import GrpcOptions, build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.config import ServeConfig
from service.control import ActorHandle, get_exporter, get_registry
from service.exporter import take_snapshot
from service.handler.handler import Handler
from service.listeners import HttpServer, bind_shared, host_and_port
from service.metrics import IngressGauges, IngressMetrics, IngressStateCollector
from service.preflight import model_folder
from service.registry import IngressReport, RegistryView, StartFailure
from service.request_log.formatting import configure_logging
from service.request_log.observer import NoTracing, RequestObserver, RequestTracer
from service.router import Router
from service.security.callers import Caller, make_callers
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from service.tracing.tracer import make_tracer
from workers.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)

_WATCH_TIMEOUT_S = 2.0
_RETRY_S = 0.2
_DRAIN_POLL_S = 0.05
_LAST_BYTES_S = 1.0


class IngressService:
    """Everything of one ingress process. Use from one event loop. Knows no Serve."""

    def __init__(
        self,
        ingress_id: str,
        node_id: str,
        config: ServeConfig,
        registry: ActorHandle,
        exporter: ActorHandle,
    ) -> None:
        self._id = ingress_id
        self._config = config
        self._registry = registry
        self._exporter = exporter
        self._collectors = CollectorRegistry()
        self._metrics = IngressMetrics(self._collectors)
        self._admission = AdmissionControl(config.admission)
        self._router = Router(
            ingress_id, node_id, config.router, config.channel, self._admission, self._metrics
        )
        self._collectors.register(IngressStateCollector(self._gauges))
        self._folder = model_folder(config.engine.model)
        self._tokenizer = TokenizerPool(_tokenizer_config(config, self._folder))
        self._tracer: RequestTracer = NoTracing()
        self._http: HttpServer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> FastAPI:
        """Listen and follow the registry; returns the HTTP application.

        Raises ConfigError if keys or certificates cannot be used, ModelLoadError if the tokenizer
        cannot be served, OSError if a port is taken.
        """
        self._config.check_files()
        await self._tokenizer.start()
        _, pieces = load_tokenizer(read_tokenizer_files(self._folder))
        handler = Handler(self._router, self._tokenizer, pieces, self._config.limits, self._metrics)
        self._tracer = make_tracer(self._config.tracing, self._id)
        services = ApiServices(
            handler=handler,
            authenticator=make_authenticator(self._load_callers()),
            is_ready=lambda: self._router.is_ready,
            version=importlib.metadata.version("tessera"),
            started_s=int(time.time()),
            observer=RequestObserver(
                self._tracer,
                is_access_log_enabled=self._config.logging.is_access_log_enabled,
            ),
        )
        app = build_http_app(services)
        await self._listen(app, services)
        self._follow(self._watch_registry())
        self._follow(self._report())
        return app

    async def report_failure(self, message: str) -> None:
        """Tell the registry that this process cannot start."""
        await self._registry.report_failure.remote(StartFailure(self._id, message))

    def check_health(self) -> None:
        """Raise if any part of this process has ended that should run."""
        self._router.check_health()
        if self._http is not None:
            self._http.check_health()
        for task in self._tasks:
            if task.done():
                task.result()

    async def shut_down(self) -> None:
        """Take nothing new, let what was admitted finish within the drain timeout, stop."""
        self._admission.begin_drain()
        end_s = time.monotonic() + self._config.drain_timeout_s
        while self._admission.num_live_requests and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._grpc is not None:
            # Health watches never end by themselves, so the grace is for last bytes only.
            await self._grpc.stop(_LAST_BYTES_S)
        if self._http is not None:
            await self._http.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._router.aclose()
        await self._tokenizer.aclose()
        await asyncio.to_thread(self._tracer.close)

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _listen(self, app: FastAPI, services: ApiServices) -> None:
        http = self._config.http
        if http.proxy == "direct":
            self._http = HttpServer(
                app, http.keep_alive_timeout_s, self._config.drain_timeout_s, http.tls
            )
            await self._http.start(bind_shared(http.host, http.port))
        address = host_and_port(self._config.grpc.host, self._config.grpc.port)
        options = GrpcOptions(can_share_port=True, tls=self._config.grpc.tls)
        self._grpc = build_grpc_server(services, address, options).server
        await self._grpc.start()

    def _load_callers(self) -> dict[bytes, Caller]:
        auth = self._config.auth
        return make_callers(
            auth.load_keys(), time.monotonic, salt_prefix_cache=auth.salt_prefix_cache_by_key
        )

    async def _watch_registry(self) -> None:
        version = 0
        while True:
            try:
                view: RegistryView = await self._registry.watch.remote(version, _WATCH_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                logger.warning("registry: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            version = view.version
            await self._router.update_replicas(view.replicas)
            if view.is_draining and not self._admission.is_draining:
                self._admission.begin_drain()
                await self._tell_registry()

    async def _report(self) -> None:
        while True:
            await self._tell_registry()
            try:
                snapshot = take_snapshot(self._collectors, "ingress", self._id)
                await self._exporter.push.remote(snapshot)
            except ray.exceptions.RayError as error:
                logger.warning("metrics exporter: %s", error)
            is_draining = self._admission.is_draining
            await asyncio.sleep(_RETRY_S if is_draining else self._config.metrics.push_interval_s)

    async def _tell_registry(self) -> None:
        num_live = self._admission.num_live_requests
        report = IngressReport(
            self._id, self._router.is_ready, self._admission.is_draining, num_live
        )
        try:
            await self._registry.report_ingress.remote(report)
        except ray.exceptions.RayError as error:
            logger.warning("registry: %s", error)

    def _gauges(self) -> IngressGauges:
        return IngressGauges(
            self._admission.num_live_requests,
            self._admission.queued_tokens,
            self._router.num_connected_replicas,
        )


class Ingress:
    """What Serve instantiates, wrapped by serve.ingress() in service.app.

    engine: the engine's Serve handle, taken so that Serve deploys it with the ingress; requests go
    through channels instead.
    """

    def __init__(self, config: ServeConfig, engine: DeploymentHandle[Any]) -> None:
        configure_logging(config.logging)
        self._service = IngressService(
            serve.get_replica_context().replica_id.unique_id,
            ray.get_runtime_context().get_node_id(),
            config,
            get_registry(config.app_name),
            get_exporter(config.app_name, config.metrics),
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Raises what IngressService.start() raises, after telling whoever waits for it."""
        try:
            return await self._service.start()
        except (ConfigError, ModelLoadError, OSError) as error:
            await self._service.report_failure(str(error))
            raise

    def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica."""
        service = getattr(self, "_service", None)
        if service is not None:
            await service.shut_down()


def _tokenizer_config(config: ServeConfig, folder: Path) -> TokenizerPoolConfig:
    return TokenizerPoolConfig(
        folder=folder,
        num_workers=config.num_tokenizer_processes,
        timeout_s=config.limits.tokenizer_timeout_s,
        max_pending_jobs=config.limits.max_pending_tokenizer_jobs,
        max_rendered_bytes=config.limits.max_rendered_bytes,
    )
