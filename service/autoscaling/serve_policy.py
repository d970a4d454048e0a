"""The policy as Ray Serve runs it: inside Serve's controller, about ten times a second.

Serve pickles this module's class by value and makes one instance for each configuration. A call
must not block: the load is asked of the registry and taken when it has come. Serve applies delays
and bounds to what is returned.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.serve.config import AutoscalingContext

from service.autoscaling.load import ModelLoad, load_key
from service.autoscaling.metrics import ScalingMetrics
from service.autoscaling.policy import ReplicaCounts, ScalingTargets, Wanted, wanted_replicas
from service.deployments.control_plane import NAMESPACE, ActorHandle, exporter_name, registry_name
from service.observability.exporter import take_snapshot

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
LOAD_EXPIRES_AFTER_S = 5.0
PUSH_INTERVAL_S = 1.0


class EngineScalingPolicy:
    """Callable of one deployment's context. Arguments are JSON: they also come from Serve's YAML.

    app_name: of the control plane's actors. model: the engine's `model`; served_name: what metrics
    call it. The targets: see AutoscalingSettings.
    """

    def __init__(
        self,
        app_name: str,
        model: str,
        served_name: str,
        target_queued_tokens: int,
        target_kv_usage: float,
        target_requests: int,
    ) -> None:
        self._model = model
        self._served_name = served_name
        self._targets = ScalingTargets(target_queued_tokens, target_kv_usage, target_requests)
        self._feed = LoadFeed(registry_name(app_name))
        self._metrics = ScalingMetrics()
        self._exporter = NamedActor(exporter_name(app_name))
        self._pushed_s = 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas; the present target while the load is not known."""
        can_wake = context.capacity_adjusted_min_replicas == 0
        key = load_key(context.deployment_name, self._model)
        load = self._feed.latest(key, can_wake)
        if load is None:
            return context.target_num_replicas, {}
        counts = ReplicaCounts(context.target_num_replicas, context.current_num_replicas)
        wanted = wanted_replicas(load, self._targets, counts)
        self._tell(context.deployment_name, wanted, counts)
        return wanted.num_replicas, {}

    def _tell(self, deployment: str, wanted: Wanted, counts: ReplicaCounts) -> None:
        self._metrics.on_decision(wanted, counts)
        now_s = time.monotonic()
        if now_s - self._pushed_s < PUSH_INTERVAL_S:
            return
        self._pushed_s = now_s
        exporter = self._exporter.get()
        if exporter is not None:
            registry = self._metrics.registry
            exporter.push.remote(
                take_snapshot(registry, "autoscaler", deployment, model=self._served_name)
            )


class NamedActor:
    """A named actor's handle, looked up when it is needed; forget() after it has died."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: ActorHandle | None = None

    def get(self) -> ActorHandle | None:
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            except ValueError:
                return None
        return self._handle

    def forget(self) -> None:
        self._handle = None


class LoadFeed:
    """The load as the registry knows it, asked for at most every POLL_INTERVAL_S."""

    def __init__(self, registry: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = NamedActor(registry)
        self._clock = clock
        self._pending: Future[ModelLoad] | None = None
        self._load: ModelLoad | None = None
        self._asked_s = self._answered_s = -math.inf

    def latest(self, key: str, can_wake: bool) -> ModelLoad | None:
        """What came last, None if nothing has come for LOAD_EXPIRES_AFTER_S."""
        now_s = self._clock()
        if self._pending is not None and self._pending.done():
            self._take(self._pending, now_s)
            self._pending = None
        if self._pending is None and now_s - self._asked_s >= POLL_INTERVAL_S:
            self._ask(key, can_wake, now_s)
        return self._load if now_s - self._answered_s < LOAD_EXPIRES_AFTER_S else None

    def _ask(self, key: str, can_wake: bool, now_s: float) -> None:
        self._asked_s = now_s
        registry = self._registry.get()
        if registry is not None:
            self._pending = registry.load_for_policy.remote(key, can_wake).future()

    def _take(self, answer: "Future[ModelLoad]", now_s: float) -> None:
        try:
            self._load, self._answered_s = answer.result(), now_s
        except ray.exceptions.RayError as error:
            logger.warning("registry: %s", error)
            self._registry.forget()
