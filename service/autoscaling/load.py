"""What replicas, ingresses and the policy tell each other about one model's load.

Plain values that travel over Ray's control plane. Knows no policy and no Ray.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.protocol import EngineStats, ModelInfo


def load_key(deployment: str, model: str) -> str:
    """What reports on one model are filed under.

    deployment: the Serve deployment of its replicas. model: the engine's `model`, so that what was
    known of another model that the deployment used to serve does not count.
    """
    return f"{deployment} {model}"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica. kv_usage: share of its pages held by running requests, in [0, 1].

    num_requests: running and waiting. idle_s: time without any work.
    """

    queued_tokens: int = 0
    kv_usage: float = 0.0
    num_requests: int = 0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaLoadReport:
    """What a running replica says of itself; key: see load_key."""

    key: str
    replica_id: str
    load: ReplicaLoad
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class DemandReport:
    """Requests of one ingress that wait for a first replica, and the model as it knows it."""

    key: str
    ingress_id: str
    num_requests: int
    num_tokens: int
    model: ModelInfo | None


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """All of one model. is_known: whether a replica of it has ever been seen running."""

    replicas: tuple[ReplicaLoad, ...] = ()
    num_waiting_requests: int = 0
    num_waiting_tokens: int = 0
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class ModelAvailability:
    """What an ingress acts upon. can_wake: the policy starts a replica for a request that waits.

    has_failed: a replica could not be started just now, for a reason that will not pass by itself.
    """

    key: str
    model: ModelInfo | None
    can_wake: bool
    has_failed: bool


class LoadMeter:
    """Turns an engine's statistics into its load. Call read() again and again, on one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_active_s = clock()
        self._last_counts = (0, 0)

    def read(self, stats: EngineStats) -> ReplicaLoad:
        """Work that came and went between two reads counts: steps and ends are counted."""
        num_requests = stats.num_running + stats.num_waiting
        counts = (stats.num_steps, stats.num_finished)
        if num_requests or counts != self._last_counts:
            self._last_active_s = self._clock()
        self._last_counts = counts
        return ReplicaLoad(
            queued_tokens=stats.queued_tokens,
            kv_usage=stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0,
            num_requests=num_requests,
            idle_s=self._clock() - self._last_active_s,
        )
