"""How many replicas a model's load asks for: a pure function with tolerance, without delays.

Knows no Ray and no clock; service.autoscaling.serve_policy runs it inside Serve, which holds
decisions back for the delays of the settings and keeps them within its bounds.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from service.autoscaling.load import ModelLoad

DOWNSCALE_SHARE = 0.8
"""A replica goes only if the others would then be at no more than this share of their target: a
load that wavers around a multiple of the target must not start and stop replicas."""
IDLE_AFTER_S = 2.0
"""Twice the interval of load reports: whatever came and went between two of them shows."""
_TOLERANCE = 1e-9


class ScalingReason(StrEnum):
    """What decided. The first four are the signals; the others overrule them."""

    QUEUED_TOKENS = "queued_tokens"
    KV_USAGE = "kv_usage"
    REQUESTS = "requests"
    WAITING = "waiting"
    FIRST_START = "first_start"
    MISSING_REPORTS = "missing_reports"
    ACTIVE = "active"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """Work of one replica; see AutoscalingSettings."""

    queued_tokens: int
    kv_usage: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """target: what the last decision asked for. running: replicas that have started."""

    target: int
    running: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The replicas asked for, why, and how many each signal alone would fill, as a fraction."""

    num_replicas: int
    reason: ScalingReason
    by_signal: dict[ScalingReason, float]


def wanted_replicas(load: ModelLoad, targets: ScalingTargets, counts: ReplicaCounts) -> Wanted:
    """The bounds are not applied: 0 is asked for whenever nobody uses the model."""
    by_signal = _signals(load, targets)
    reason, needed = max(by_signal.items(), key=lambda item: item[1])
    num_replicas = _with_tolerance(needed, counts.target)
    if len(load.replicas) < counts.running and num_replicas < counts.target:
        # The silent ones may be the loaded ones.
        return Wanted(counts.target, ScalingReason.MISSING_REPORTS, by_signal)
    if num_replicas > 0:
        return Wanted(num_replicas, reason, by_signal)
    if not load.is_known:
        return Wanted(1, ScalingReason.FIRST_START, by_signal)
    if any(replica.idle_s < IDLE_AFTER_S for replica in load.replicas):
        return Wanted(1, ScalingReason.ACTIVE, by_signal)
    return Wanted(0, ScalingReason.IDLE, by_signal)


def _signals(load: ModelLoad, targets: ScalingTargets) -> dict[ScalingReason, float]:
    replicas = load.replicas
    queued_tokens = load.num_waiting_tokens + sum(r.queued_tokens for r in replicas)
    num_requests = load.num_waiting_requests + sum(r.num_requests for r in replicas)
    return {
        # First among equals: one short request that waits is no queue, but it needs a replica.
        ScalingReason.WAITING: 1.0 if load.num_waiting_requests else 0.0,
        ScalingReason.QUEUED_TOKENS: queued_tokens / targets.queued_tokens,
        ScalingReason.KV_USAGE: sum(r.kv_usage for r in replicas) / targets.kv_usage,
        ScalingReason.REQUESTS: num_requests / targets.num_requests,
    }


def _with_tolerance(needed: float, num_target: int) -> int:
    """needed, rounded up; fewer than the present target only with room to spare."""
    if needed >= num_target:
        return math.ceil(needed - _TOLERANCE)
    return min(num_target, math.ceil(needed / DOWNSCALE_SHARE - _TOLERANCE))
