"""Settings of autoscaling, validated where the service's configuration is."""

from collections.abc import Collection
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AutoscalingSettings(BaseModel):
    """Bounds, targets and delays of one model's engine replicas.

    min_replicas: 0 lets the model go when nobody uses it; the first request after that waits for a
    replica. The targets say how much work one replica should have; whichever asks for most
    replicas decides. target_queued_tokens: prompt tokens not yet computed. target_kv_usage: share
    of the KV pages held by running requests. target_requests: requests running and waiting; None
    takes the engine's max_running_requests. upscale_delay_s, downscale_delay_s: how long a decision
    must hold before it is carried out; neither holds up the first replica. scale_to_zero_after_s:
    without any request, for the last replica.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    target_queued_tokens: int = Field(default=16384, ge=1)
    target_kv_usage: float = Field(default=0.8, gt=0, le=1)
    target_requests: int | None = Field(default=None, ge=1)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    scale_to_zero_after_s: float = Field(default=900.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not be more than max_replicas")
        return self


def check_either(autoscaling: AutoscalingSettings | None, given: Collection[str]) -> None:
    """Raise ValueError if a number of replicas is given besides. given: names of settings."""
    if autoscaling is not None and "num_replicas" in given:
        raise ValueError("num_replicas and autoscaling exclude each other: give one of them")


class WaitingSettings(BaseModel):
    """Requests that an ingress holds while their model has no replica because it was scaled to
    zero.

    wait_s: at most, each. max_requests, max_tokens: of all that wait, per ingress and model; one
    request of any length is taken. retry_after_s: what a client is told whose wait was in vain.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    wait_s: float = Field(default=300.0, gt=0)
    max_requests: int = Field(default=256, ge=1)
    max_tokens: int = Field(default=1 << 20, ge=1)
    retry_after_s: float = Field(default=10.0, gt=0)
