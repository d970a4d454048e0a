"""Ingress: the Serve deployment that clients talk to. HTTP and gRPC in front, channels behind.

Composes models and API servers in one process and keeps them informed by the registry. A
token passes no Ray code here: it comes from a channel and leaves through a socket of this process
(or, for HTTP, through the proxy that the configuration asks for).
"""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from service.adapters.control import AdapterControl
from service.adapters.table import AdapterTable
from service.api.auth import Authenticator, OpenAuthenticator
from service.api.http import build_http_app
from service.api.key_ring import KeyRing
from service.api.services import AdminServices, ApiServices
from service.api.web import WebSurface
from service.autoscaling.load import DemandReport
from service.config import ModelConfig, ServeConfig
from service.deployments.adapter_board import RemoteAdapterBoard
from service.deployments.audit import RemoteAudit
from service.deployments.control_plane import ActorHandle, get_exporter, get_registry
from service.deployments.departure import Departure
from service.deployments.front_door import FrontDoor
from service.deployments.metrics_reader import ActorMetricsReader
from service.deployments.model_front import ModelFront, Readiness
from service.deployments.registry import IngressReport, RegistryView, StartFailure
from service.deployments.response_store_actor import RemoteResponseStore, get_response_store
from service.deployments.silence_watch import SilenceWatch
from service.errors import ApiError
from service.handler.directory import ModelDirectory, ServedModel
from service.handler.task import task_of
from service.observability.exporter import take_snapshot
from service.observability.metrics import RefusalMetrics
from service.observability.request_log.formatting import configure_logging
from service.observability.request_log.observer import SILENT, RequestObserver
from service.observability.tracing.tracer import make_tracer
from service.page.files import load_page
from service.response_store.runs import Runs
from service.routing.admission import IngressAdmission
from service.security.admin import AdminGate
from service.security.callers import make_anonymous
from service.security.renewal import Renewable, keep_renewed
from workers.errors import ConfigError, ModelLoadError
from workers.long_lived import settle

logger = logging.getLogger(__name__)

_WATCH_TIMEOUT_S = 2.0
_RETRY_S = 0.2
_LINK_TIMEOUT_S = 5.0
_LINK_POLL_S = 0.01


class IngressService:
    """Everything of one ingress process. Use from one event loop. Knows no Serve."""

    def __init__(
        self,
        ingress_id: str,
        node_id: str,
        config: ServeConfig,
        models: Sequence[ModelConfig],
        registry: ActorHandle,
        exporter: ActorHandle,
        response_store: RemoteResponseStore,
    ) -> None:
        self._id = ingress_id
        self._config = config
        self._registry = registry
        self._exporter = exporter
        self._store = response_store
        self._responses = Runs(ingress_id, response_store, config.limits.max_stored_response_bytes)
        self._collectors = CollectorRegistry()
        self._refusals = RefusalMetrics(self._collectors)
        self._admission = IngressAdmission(config.admission, len(models))
        self._models = [
            ModelFront(ingress_id, node_id, model, config, admission)
            for model, admission in zip(models, self._admission.models, strict=True)
        ]
        self._served: list[ServedModel] = []
        self._board = RemoteAdapterBoard(registry, ingress_id, node_id)
        self._adapters = self._adapter_control()
        self._is_ready = Readiness(self._models)
        self._observer: RequestObserver = SILENT
        self._door = FrontDoor(config)
        self._renewables: list[Renewable[Any]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_informed = False

    async def start(self) -> FastAPI:
        """Listen and follow the registry; returns the HTTP application.

        Raises ConfigError if keys or certificates cannot be used, ModelLoadError if a tokenizer
        cannot be served, OSError if a port is taken.
        """
        self._config.check_files()
        self._served = await asyncio.gather(*(model.start() for model in self._models))
        self._adapters = self._adapter_control()
        self._observer = RequestObserver(
            make_tracer(self._config.tracing, self._id),
            is_access_log_enabled=self._config.logging.is_access_log_enabled,
        )
        services = ApiServices(
            unknown_fields=self._config.http.unknown_fields,
            models=ModelDirectory(self._served, self._config.limits, self._refusals),
            authenticator=self._make_authenticator(),
            is_ready=self._is_ready,
            version=importlib.metadata.version("tessera"),
            started_s=int(time.time()),
            session_header=self._config.router.session_header,
            observer=self._observer,
            responses=self._responses,
            web=self._make_web_surface(),
            admin=self._make_admin_services(),
        )
        app = build_http_app(services)
        self._follow(self._watch_registry())
        await self._wait_for_replicas()
        await self._door.open(app, services)
        self._follow(self._door.keep())
        self._follow(keep_renewed((*self._renewables, *self._door.renewables)))
        self._follow(self._report())
        self._follow(self._push_metrics())
        self._follow(self._follow_cancellations())
        for model in self._models:
            self._follow(model.report_demand(self._send_demand))
            self._follow(model.watch_folder(self._adapters, self._board))
        return app

    async def report_failure(self, message: str) -> None:
        """Tell the registry that this process cannot start."""
        await self._registry.report_failure.remote(StartFailure(self._id, message))

    def check_health(self) -> None:
        """Raise if any part of this process has ended that should run."""
        for model in self._models:
            model.check_health()
        self._door.check_health()
        for task in self._tasks:
            if task.done():
                task.result()

    async def shut_down(self) -> None:
        """Let what was admitted finish within the drain timeout, stop. See Departure."""
        await Departure(
            self._door.http,
            self._door.rpc,
            self._door.calls,
            self._admission,
            self._end_requests,
            self._config.drain_timeout_s,
        ).run()
        await self._responses.finish()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.aclose() for model in self._models))
        await asyncio.to_thread(self._observer.close)

    def _end_requests(self) -> int:
        return sum(model.end_requests() for model in self._models)

    def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _wait_for_replicas(self) -> None:
        """Until the replicas that there are can be reached; not for ones that are to start.

        Other ingresses may listen on the same port, so whoever listens gets requests at once.
        """
        end_s = time.monotonic() + _LINK_TIMEOUT_S
        while not (self._is_informed and self._is_linked()) and time.monotonic() < end_s:
            await asyncio.sleep(_LINK_POLL_S)

    def _is_linked(self) -> bool:
        return all(model.is_linked for model in self._models)

    def _make_authenticator(self) -> Authenticator:
        auth = self._config.auth
        files = () if auth.api_key_file is None else (auth.api_key_file,)
        # Before the keys are read: a file that changes meanwhile is read again.
        renewable = Renewable("auth.api_key_file", files, auth.load_keys)
        keys = auth.load_keys()
        if not keys:
            return OpenAuthenticator(make_anonymous(auth.priorities))
        ring = KeyRing(keys, time.monotonic, salt_prefix_cache=auth.salt_prefix_cache_by_key)
        self._renewables.append(renewable.into(ring.renew))
        return ring

    def _adapter_control(self) -> AdapterControl:
        fronts = {model.name: model for model in self._models}
        return AdapterControl(
            {name: front.shelf for name, front in fronts.items()},
            lambda name: fronts[name].adapter_info(),
            self._board,
        )

    def _make_admin_services(self) -> AdminServices | None:
        keys = self._config.auth.load_admin_keys()
        if not keys:
            return None
        sleep = {model.name: model.sleep for model in self._models}
        audit = RemoteAudit(self._registry, self._id)
        return AdminServices(AdminGate(keys), self._adapters, sleep, audit.record)

    def _make_web_surface(self) -> WebSurface:
        http = self._config.http
        reader = ActorMetricsReader(self._exporter)
        page = load_page() if http.has_page else {}
        return WebSurface(http.cors, page, http.metrics, reader)

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
            for model in self._models:
                await model.update_replicas(view.replicas)
                model.update_availability(view.availability)
            await self._take_adapters(view.adapters)
            self._is_informed = True
            if view.is_draining and not self._admission.is_draining:
                self._admission.begin_drain()
                await self._tell_registry()

    async def _take_adapters(self, table: AdapterTable) -> None:
        try:
            await self._adapters.take(table)
        except ApiError as error:
            logger.warning("adapters: %s", error)

    async def _report(self) -> None:
        while True:
            await self._tell_registry()
            await asyncio.sleep(self._report_interval_s)

    async def _push_metrics(self) -> None:
        """Apart from _report(): a call of an actor on a lost node may last until Ray's head is
        back, and only that actor's callers may wait for it."""
        while True:
            try:
                for snapshot in self._snapshots():
                    await self._exporter.push.remote(snapshot)
            except ray.exceptions.RayError as error:
                logger.warning("metrics exporter: %s", error)
            await asyncio.sleep(self._report_interval_s)

    async def _follow_cancellations(self) -> None:
        """The store may have been made by an earlier deployment, with other limits."""
        try:
            await self._store.limit(self._config.limits.of_store)
        except ApiError as error:
            logger.warning("stored responses: %s", error)
        await self._responses.follow()

    @property
    def _report_interval_s(self) -> float:
        is_draining = self._admission.is_draining
        return _RETRY_S if is_draining else self._config.metrics.push_interval_s

    async def _tell_registry(self) -> None:
        report = IngressReport(
            self._id,
            self._is_ready(),
            self._admission.is_draining,
            self._admission.num_live_requests,
            {model.name: task_of(model.info) for model in self._served if model.info is not None},
        )
        try:
            await self._registry.report_ingress.remote(report)
        except ray.exceptions.RayError as error:
            logger.warning("registry: %s", error)

    async def _send_demand(self, report: DemandReport) -> None:
        try:
            await self._registry.report_demand.remote(report)
        except ray.exceptions.RayError as error:
            logger.warning("registry: %s", error)

    def _snapshots(self) -> list[bytes]:
        own = take_snapshot(self._collectors, "ingress", self._id)
        return [own, *(model.snapshot() for model in self._models)]


class Ingress:
    """What Serve instantiates, wrapped by serve.ingress() in service.app.

    engines: their Serve handles, taken so that Serve deploys them with the ingress; requests go
    through channels instead.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: tuple[ModelConfig, ...],
        *engines: DeploymentHandle[Any],
    ) -> None:
        configure_logging(config.logging)
        SilenceWatch(config.replica.step_timeout_s).start()
        self._service = IngressService(
            serve.get_replica_context().replica_id.unique_id,
            ray.get_runtime_context().get_node_id(),
            config,
            models,
            get_registry(config.app_name),
            get_exporter(config.app_name, config.metrics),
            get_response_store(config.app_name, config.limits.of_store),
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Raises what IngressService.start() raises, after telling whoever waits for it."""
        try:
            app = await self._service.start()
        except (ConfigError, ModelLoadError, OSError) as error:
            await self._service.report_failure(str(error))
            raise
        settle()
        return app

    def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica."""
        service = getattr(self, "_service", None)
        if service is not None:
            await service.shut_down()
