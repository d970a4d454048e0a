"""Start Ray and the application, wait until it serves, drain it, end it.

Sets Ray's own environment variables, which Ray reads when it is imported: so Ray is imported here
only after prepare_environment(). Knows no terminal: progress goes to a callback.
"""

import logging
import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from service.command.own_ray import start_own_ray
from service.command.preflight import check_before_start, check_ray_answers
from service.config import ServeConfig
from service.deployments.engine_factory import EngineFactory, create_engine
from service.handler.task import Task
from service.security.audit import describe_this_process
from workers.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import ray

    from service.deployments.registry import ServiceStatus

OBJECT_STORE_BYTES = 128 << 20
_POLL_S = 0.1
_DRAIN_REPORT_S = 2.0
_ANSWER_TIMEOUT_S = 5.0

ProgressCallback = Callable[["ServiceStatus", str], None]


class LaunchError(Exception):
    """The service did not come up, with what Serve says about it."""


@dataclass(frozen=True, slots=True)
class RayTarget:
    """address: a running Ray to join; None starts one on this machine that ends with us."""

    address: str | None

    @property
    def is_own(self) -> bool:
        return self.address is None


def prepare_environment(
    config: ServeConfig, target: RayTarget, environment: MutableMapping[str, str]
) -> None:
    """What this process and the Ray it starts need; what the operator has set stays."""
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # One port of every Serve replica stays open on all interfaces and unpickles what it gets:
        # the token is what guards it.
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        # A replica that fails its checks hangs: it would not answer a polite stop either.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Our own drain comes first; Serve's minimum would only add half a minute to each stop.
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
    if config.http.proxy == "haproxy":
        settings["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    if target.is_own:
        # Named after where it is the default; it makes a Ray of one machine bind loopback.
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for name, value in settings.items():
        environment.setdefault(name, value)


class Launcher:
    """One application on one Ray. Methods in order: connect, deploy, wait, drain, stop."""

    def __init__(
        self,
        config: ServeConfig,
        target: RayTarget,
        create_engine: EngineFactory = create_engine,
    ) -> None:
        self._config = config
        self._target = target
        self._create_engine = create_engine
        self._is_lost = False

    def connect(self) -> None:
        """Start or join Ray and start Serve.

        Raises LaunchError if the cluster is not there or the configuration cannot work here.
        """
        try:
            if self._target.address is None:
                check_before_start(self._config)
            else:
                check_ray_answers(self._target.address)
        except (ConfigError, ModelLoadError) as error:
            raise LaunchError(str(error)) from error
        from ray import serve
        from ray.serve.config import HTTPOptions

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        start = start_own_ray if self._target.is_own else _join_ray
        try:
            start(self._ray_options())
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise LaunchError(f"Ray: {error}") from error
        http = self._config.http
        serve.start(
            proxy_location="Disabled" if http.proxy == "direct" else "EveryNode",
            http_options=HTTPOptions(
                host=http.host, port=http.port, keep_alive_timeout_s=http.keep_alive_timeout_s
            ),
        )

    def deploy(self) -> None:
        """Hand the application to Serve. Raises LaunchError if metrics cannot be served."""
        from ray import serve
        from ray.serve import RunTarget

        from service.app import build_app
        from service.deployments.control_plane import get_exporter, get_registry

        name = self._config.app_name
        self._registry = get_registry(name)
        self._registry.end_drain.remote(describe_this_process())
        # Both actors start while Serve deploys; only their answers are waited for.
        port = get_exporter(name, self._config.metrics).port.remote()
        app = build_app(self._config, self._create_engine)
        target = RunTarget(app, name=name, route_prefix="/")
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        self._check_exporter(port)

    def wait_until_ready(
        self, on_progress: ProgressCallback, should_stop: Callable[[], bool]
    ) -> bool:
        """True when requests are served, False when should_stop() said so first.

        Raises LaunchError if the deployment failed or took longer than it may.
        """
        models = self._config.served_models()
        timeout_s = max(model.replica.startup_timeout_s for model in models)
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if should_stop():
                return False
            state, messages = self._serve_status()
            status = self._service_status()
            on_progress(status, state)
            if status.failures:
                raise LaunchError("\n".join(dict.fromkeys(f.message for f in status.failures)))
            if state in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise LaunchError("\n".join(messages) or state)
            if state == "RUNNING" and any(report.is_ready for report in status.ingresses):
                return True
            time.sleep(_POLL_S)
        raise LaunchError(f"not ready after {timeout_s:.0f} s")

    def tasks(self) -> dict[str, Task]:
        """What the models are for that an ingress has seen, by their names."""
        reports = self._service_status().ingresses
        return {name: task for report in reports for name, task in report.tasks.items()}

    def drain(self, on_progress: ProgressCallback, should_stop: Callable[[], bool]) -> bool:
        """Refuse new requests and wait for those under way; False if some were still running."""
        import ray

        ray.get(self._registry.begin_drain.remote(describe_this_process()))
        end_s = time.monotonic() + self._config.drain_timeout_s
        told_s = time.monotonic() + _DRAIN_REPORT_S
        while time.monotonic() < end_s and not should_stop():
            status = self._service_status()
            on_progress(status, "DRAINING")
            draining = [report for report in status.ingresses if report.is_draining]
            has_answers = bool(draining) and len(draining) == len(status.ingresses)
            if has_answers and not sum(report.num_live_requests for report in draining):
                return True
            if not status.ingresses and time.monotonic() > told_s:
                return True  # no ingress is left that could have requests
            time.sleep(_POLL_S)
        return False

    def stop(self) -> None:
        """End the application and, if it is ours, Ray. Harmless if connect() failed."""
        import ray
        from ray import serve

        from service.deployments.control_plane import close_control_plane

        if not ray.is_initialized():
            return
        if not self._is_lost:
            serve.delete(self._config.app_name)
            close_control_plane(self._config.app_name)
        ray.shutdown()

    def _ray_options(self) -> dict[str, Any]:
        if not self._target.is_own:
            return {
                "address": self._target.address,
                "log_to_driver": False,
                "logging_level": logging.WARNING,
            }
        num_cpus = sum(
            model.max_replicas * model.engine.tp_size * model.replica.cpus_per_rank
            for model in self._config.served_models()
        )
        return {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": max(os.cpu_count() or 1, int(num_cpus) + 1),
            "log_to_driver": False,
            "logging_level": logging.WARNING,
        }

    def _check_exporter(self, port: "ray.ObjectRef[int]") -> None:
        import ray

        try:
            ray.get(port)
        except ray.exceptions.RayError as error:
            address = f"{self._config.metrics.host}:{self._config.metrics.port}"
            reason = _last_words(str(error))
            raise LaunchError(f"metrics cannot be served on {address}: {reason}") from error

    def is_answering(self) -> bool:
        """Whether the control plane answers. A registry that restarts does so within seconds.

        While it does not, stop() asks nothing of it either.
        """
        import ray

        try:
            ray.get(self._registry.status.remote(), timeout=_ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError:
            self._is_lost = True
        else:
            self._is_lost = False
        return not self._is_lost

    def _service_status(self) -> "ServiceStatus":
        import ray

        status: ServiceStatus = ray.get(self._registry.status.remote())
        return status

    def _serve_status(self) -> tuple[str, list[str]]:
        """The application's state and what its deployments say."""
        from ray import serve

        application = serve.status().applications.get(self._config.app_name)
        if application is None:
            return "NOT_STARTED", []
        messages = [
            f"{name}: {_last_words(deployment.message)}"
            for name, deployment in application.deployments.items()
            if deployment.message
        ]
        return application.status.value, messages


def _join_ray(options: dict[str, Any]) -> None:
    import ray

    ray.init(**options)


def _last_words(message: str) -> str:
    """Of a message that ends in a traceback, the exception alone; the rest is in Ray's logs."""
    return message.rstrip().rpartition("\n")[2] if "Traceback" in message else message
