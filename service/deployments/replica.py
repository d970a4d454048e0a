"""EngineReplica: the Serve deployment that owns one engine. Control plane only.

Starts the engine and its channel, announces where the channel listens, watches the engine's health,
drains. No token passes through Ray: they leave through the channel.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import ray
from prometheus_client import CollectorRegistry
from ray import serve

from service.autoscaling.load import LoadMeter, ReplicaLoad, ReplicaLoadReport, load_key
from service.channel.address import ReplicaAddress
from service.channel.server import ChannelServer
from service.config import ModelConfig, ServeConfig
from service.deployments.control_plane import (
    ANNOUNCE_INTERVAL_S,
    ActorHandle,
    get_exporter,
    get_registry,
)
from service.deployments.engine_factory import EngineFactory, EngineHandle, EngineHooks
from service.deployments.registry import StartFailure, StartProgress
from service.deployments.silence_watch import SilenceWatch
from service.deployments.step_watch import StepWatch, ailment
from service.hub.resolve import resolve_engine
from service.listening import MetricsSettings
from service.observability.exporter import take_snapshot
from service.observability.metrics import EngineMetrics, EngineStatsCollector
from service.observability.request_log.formatting import configure_logging
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats, ModelInfo
from workers.errors import ConfigError, EngineFailedError, ModelLoadError

if TYPE_CHECKING:
    from attention.roofline import HardwareLimits

logger = logging.getLogger(__name__)

EXIT_ENGINE_FAILED = 70
_DRAIN_POLL_S = 0.02
_FAILURE_FLUSH_S = 0.2
_CONTROL_TIMEOUT_S = 5.0


class NoticeBoard(Protocol):
    """Where a replica tells the rest of the service about itself. Must not raise."""

    def report_progress(self, stage: str, fraction: float) -> None: ...

    def report_failure(self, message: str) -> None: ...

    def announce(self, address: ReplicaAddress) -> None: ...

    def report_load(self, load: ReplicaLoad, model: ModelInfo) -> None: ...

    def withdraw(self) -> None: ...

    def push_metrics(self, snapshot: bytes) -> None: ...


class ReplicaHost:
    """An engine with its channel, metrics and life cycle. Knows no Serve."""

    def __init__(
        self,
        replica_id: str,
        model: ModelConfig,
        metrics: MetricsSettings,
        channel: ChannelServer,
        board: NoticeBoard,
        exit_process: Callable[[int], None],
    ) -> None:
        self._replica_id = replica_id
        self._model = model
        self._metrics_settings = metrics
        self._channel = channel
        self._board = board
        self._exit_process = exit_process
        self._metrics = CollectorRegistry()
        self._engine: EngineHandle | None = None
        self._stopping = threading.Event()
        self._failing = threading.Lock()

    def start(self, create_engine: EngineFactory) -> None:
        """Load, listen, announce. Raises what the factory raises.

        What another attempt cannot change is also told to the board, for whoever waits.
        """
        settings = self._model.engine
        try:
            engine_config = resolve_engine(
                settings.to_engine_config(), settings.revision, self._on_fetched
            )
            limits = hardware_limits(self._metrics_settings, engine_config)
            hooks = EngineHooks(
                on_outputs=self._channel.publish,
                on_failure=self._on_failure,
                on_progress=self._board.report_progress,
                on_step=EngineMetrics(self._metrics, limits).on_step,
            )
            self._engine = create_engine(engine_config, hooks)
        except (ConfigError, ModelLoadError) as error:
            self._board.report_failure(str(error))
            raise
        self._metrics.register(EngineStatsCollector(self._engine.info, self._engine.stats))
        self._address = self._channel.start(self._engine)
        self._engine.start()
        self._watch = StepWatch(self._engine, self._model.replica.step_timeout_s, self._on_failure)
        self._watch.start()
        # Who waits for start() to return may then stop another replica: be known before.
        self._board.announce(self._address)
        self._announcer = threading.Thread(
            target=self._announce, args=(self._engine,), name="tessera-announcer", daemon=True
        )
        self._announcer.start()

    def check_health(self) -> None:
        """Raise EngineFailedError if the engine's thread is dead or does not turn."""
        found = self._ailment(self._running_engine())
        if found is not None:
            raise EngineFailedError(found)

    def stats(self) -> EngineStats:
        return self._running_engine().stats()

    def shut_down(self, drain_timeout_s: float) -> None:
        """Take no new requests, let the others finish, stop. Calling it again is harmless."""
        if self._engine is None or self._stopping.is_set():
            return
        if not self._drain(self._engine, drain_timeout_s):
            logger.warning(
                "the drain ended with %d requests under way: they go on where there is another "
                "replica, or end with an error",
                self._channel.num_live_requests,
            )
        self._stopping.set()
        self._watch.stop()
        self._channel.close()
        self._engine.stop()
        self._announcer.join()

    def _on_fetched(self, bytes_done: int, bytes_total: int) -> None:
        logger.info("fetched %.2f of %.2f GB of weights", bytes_done / 1e9, bytes_total / 1e9)
        self._board.report_progress("fetching weights", bytes_done / bytes_total)

    def _drain(self, engine: EngineHandle, timeout_s: float) -> bool:
        self._board.withdraw()
        self._channel.drain()
        engine.drain()
        end_s = time.monotonic() + timeout_s
        while not (engine.is_drained() and self._channel.num_live_requests == 0):
            if time.monotonic() > end_s or self._ailment(engine) is not None:
                return False
            time.sleep(_DRAIN_POLL_S)
        return True

    def _ailment(self, engine: EngineHandle) -> str | None:
        return ailment(engine, self._model.replica.step_timeout_s)

    def _running_engine(self) -> EngineHandle:
        if self._engine is None:
            raise EngineFailedError("the engine has not been started")
        return self._engine

    def _on_failure(self, failure: BaseException) -> None:
        """Requests go on elsewhere the sooner, the sooner their connection breaks.

        Called by any thread: the engine's, the one that waits for a rank's death, the step watch's.
        """
        if not self._failing.acquire(blocking=False):
            return
        logger.critical("the engine failed; the replica ends", exc_info=failure)
        self._channel.close(_FAILURE_FLUSH_S)
        self._exit_process(EXIT_ENGINE_FAILED)

    def _announce(self, engine: EngineHandle) -> None:
        meter = LoadMeter()
        while not self._stopping.is_set():
            self._board.announce(self._address)
            self._board.report_load(meter.read(engine.stats()), engine.info)
            self._board.push_metrics(self._snapshot())
            self._stopping.wait(min(ANNOUNCE_INTERVAL_S, self._metrics_settings.push_interval_s))

    def _snapshot(self) -> bytes:
        return take_snapshot(self._metrics, "engine", self._replica_id, model=self._model.name)


class RayNoticeBoard:
    """NoticeBoard over the control plane's actors; what cannot be delivered is logged."""

    def __init__(
        self,
        replica_id: str,
        model: str,
        load_key: str,
        registry: ActorHandle,
        exporter: ActorHandle,
    ) -> None:
        self._replica_id = replica_id
        self._model = model
        self._load_key = load_key
        self._registry = registry
        self._exporter = exporter
        self._is_withdrawn = False

    def report_progress(self, stage: str, fraction: float) -> None:
        progress = StartProgress(self._replica_id, self._model, stage, fraction)
        self._call(self._registry.report_progress.remote(progress))

    def report_failure(self, message: str) -> None:
        failure = StartFailure(self._replica_id, f"{self._model}: {message}")
        self._call(self._registry.report_failure.remote(failure))
        self._call(self._registry.report_start_failure.remote(self._load_key))

    def announce(self, address: ReplicaAddress) -> None:
        if not self._is_withdrawn:
            self._call(self._registry.announce.remote(address))

    def report_load(self, load: ReplicaLoad, model: ModelInfo) -> None:
        if not self._is_withdrawn:
            report = ReplicaLoadReport(self._load_key, self._replica_id, load, model)
            self._call(self._registry.report_load.remote(report))

    def withdraw(self) -> None:
        self._is_withdrawn = True
        self._call(self._registry.withdraw.remote(self._replica_id))

    def push_metrics(self, snapshot: bytes) -> None:
        self._call(self._exporter.push.remote(snapshot))

    def _call(self, reference: "ray.ObjectRef[None]") -> None:
        try:
            ray.get(reference, timeout=_CONTROL_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            logger.warning("control plane: %s", error)


class EngineReplica:
    """What Serve instantiates. Raises what the engine's factory raises."""

    def __init__(
        self, config: ServeConfig, model: ModelConfig, create_engine: EngineFactory
    ) -> None:
        configure_logging(config.logging)
        SilenceWatch(model.replica.step_timeout_s).start()
        replica_id = serve.get_replica_context().replica_id.unique_id
        board = RayNoticeBoard(
            replica_id,
            model.name,
            load_key(model.deployment, model.engine.model),
            get_registry(config.app_name),
            get_exporter(config.app_name, config.metrics),
        )
        node_id = ray.get_runtime_context().get_node_id()
        node_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        channel = ChannelServer(replica_id, node_id, config.channel, node_address)
        self._drain_timeout_s = config.drain_timeout_s
        # A failed engine must not linger: leaving at once is what makes Serve replace the replica.
        self._host = ReplicaHost(replica_id, model, config.metrics, channel, board, os._exit)
        self._host.start(create_engine)

    def check_health(self) -> None:
        self._host.check_health()

    def stats(self) -> EngineStats:
        return self._host.stats()

    def __del__(self) -> None:
        """Serve calls this when it stops the replica, and waits for it."""
        host = getattr(self, "_host", None)
        if host is not None:
            host.shut_down(self._drain_timeout_s)


def hardware_limits(settings: MetricsSettings, config: EngineConfig) -> "HardwareLimits | None":
    """Of the engine's device: what the settings say, else what was measured on devices of its name.

    None on a CPU, and, with a warning, on a GPU that nobody measured. Raises ConfigError for a
    device that is not there.
    """
    # Imported here because whoever builds the application must not load torch.
    from attention.hardware import measured_limits
    from attention.roofline import HardwareLimits
    from attention.selection import detect_device
    from workers.runner.sizing import resolve_device

    if settings.peak_bytes_per_s is not None and settings.peak_flops_per_s is not None:
        return HardwareLimits(settings.peak_bytes_per_s, settings.peak_flops_per_s)
    device = detect_device(resolve_device(config))
    limits = measured_limits(device)
    if limits is None and device.device_type == "cuda":
        logger.warning(
            "nothing was measured on a %s, so tessera_attention_roofline_ratio is left out; set "
            "metrics.peak_bytes_per_s and metrics.peak_flops_per_s to have it",
            device.name,
        )
    return limits
