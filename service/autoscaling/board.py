"""What is known of every model's load: the registry's part for autoscaling.

Everybody reports again and again; what falls silent is forgotten, so a successor of this board
knows the same within a second. Knows no Ray. Single-threaded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from service.autoscaling.load import (
    DemandReport,
    ModelAvailability,
    ModelLoad,
    ReplicaLoadReport,
)
from workers.engine.protocol import ModelInfo

REPORT_EXPIRES_AFTER_S = 5.0
POLICY_EXPIRES_AFTER_S = 60.0
"""A restarting controller must not make ingresses forget that they may wait."""
FAILURE_HOLDS_S = 60.0
"""Requests are refused for so long after a failed start; the next one then tries again."""


@dataclass(slots=True)
class _Model:
    """One model's reports with the times at which they came."""

    replicas: dict[str, tuple[float, ReplicaLoadReport]] = field(default_factory=dict)
    demands: dict[str, tuple[float, DemandReport]] = field(default_factory=dict)
    info: ModelInfo | None = None
    can_wake: bool = False
    policy_heard_s: float | None = None
    failed_s: float | None = None


class LoadBoard:
    """version changes whenever what availability() tells changes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._told: tuple[ModelAvailability, ...] = ()
        self._version = 0

    @property
    def version(self) -> int:
        self.availability()
        return self._version

    def report_load(self, report: ReplicaLoadReport) -> None:
        model = self._model(report.key)
        if report.replica_id not in model.replicas:
            model.failed_s = None
        model.replicas[report.replica_id] = (self._clock(), report)
        model.info = report.model

    def forget(self, replica_id: str) -> None:
        """The replica takes no new requests: its load is no reason for anything."""
        for model in self._models.values():
            model.replicas.pop(replica_id, None)

    def report_demand(self, report: DemandReport) -> None:
        model = self._model(report.key)
        model.demands[report.ingress_id] = (self._clock(), report)
        if model.info is None:
            model.info = report.model

    def report_policy(self, key: str, *, can_wake: bool) -> None:
        """The model is scaled by a policy; can_wake: from zero, too."""
        model = self._model(key)
        model.policy_heard_s, model.can_wake = self._clock(), can_wake

    def report_start_failure(self, key: str) -> None:
        """A replica cannot start for a reason that another attempt does not change."""
        self._model(key).failed_s = self._clock()

    def load(self, key: str) -> ModelLoad:
        model = self._model(key)
        self._expire(model)
        demands = [demand for _, demand in model.demands.values()]
        return ModelLoad(
            replicas=tuple(report.load for _, report in model.replicas.values()),
            num_waiting_requests=sum(demand.num_requests for demand in demands),
            num_waiting_tokens=sum(demand.num_tokens for demand in demands),
            is_known=model.info is not None,
        )

    def availability(self) -> tuple[ModelAvailability, ...]:
        """Of every model that a policy scales."""
        told = tuple(
            ModelAvailability(key, model.info, model.can_wake, self._has_failed(model))
            for key, model in self._models.items()
            if self._is_scaled(model)
        )
        if told != self._told:
            self._told = told
            self._version += 1
        return told

    def _model(self, key: str) -> _Model:
        return self._models.setdefault(key, _Model())

    def _is_scaled(self, model: _Model) -> bool:
        heard_s = model.policy_heard_s
        return heard_s is not None and self._clock() - heard_s < POLICY_EXPIRES_AFTER_S

    def _has_failed(self, model: _Model) -> bool:
        return model.failed_s is not None and self._clock() - model.failed_s < FAILURE_HOLDS_S

    def _expire(self, model: _Model) -> None:
        oldest_s = self._clock() - REPORT_EXPIRES_AFTER_S
        model.replicas = {k: v for k, v in model.replicas.items() if v[0] >= oldest_s}
        model.demands = {k: v for k, v in model.demands.items() if v[0] >= oldest_s}
