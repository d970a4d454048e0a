"""Settings of the token way, validated where the service's configuration is."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ChannelSettings(BaseModel):
    """Sizes in bytes and times in seconds of every channel of a service.

    transport "unix" serves ingresses of the replica's own node only. "unix+tcp" also listens on the
    node's address, which ingresses of other nodes need; every connection proves the channel key.
    max_outbox_bytes: a peer that lets more than this pile up unread is dropped and its requests are
    aborted; a replica only where it takes nothing of it meanwhile. max_stream_bytes: a client that
    lets more than this pile up unread loses its request.
    heartbeat_timeout_s: silence after which a peer counts as dead, without our own standing still;
    idle peers beat every heartbeat_interval_s. stall_timeout_s: a replica that has work but
    finishes no step for so long gets no new requests. load_interval_s: least time between two load
    reports to one ingress.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["unix", "unix+tcp"] = "unix"
    max_frame_bytes: int = Field(default=64 << 20, ge=1 << 10, lt=1 << 32)
    max_outbox_bytes: int = Field(default=64 << 20, ge=1 << 10)
    max_stream_bytes: int = Field(default=8 << 20, ge=1 << 10)
    load_interval_s: float = Field(default=0.05, gt=0)
    heartbeat_interval_s: float = Field(default=0.5, gt=0)
    heartbeat_timeout_s: float = Field(default=5.0, gt=0)
    stall_timeout_s: float = Field(default=30.0, gt=0)
    handshake_timeout_s: float = Field(default=5.0, gt=0)
    reconnect_initial_s: float = Field(default=0.05, gt=0)
    reconnect_max_s: float = Field(default=1.0, gt=0)

    @property
    def look_interval_s(self) -> float:
        """How often either end looks whether its peer is silent, and whether a beat is due."""
        return self.heartbeat_interval_s / 2

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must be at least twice heartbeat_interval_s")
        if self.reconnect_max_s < self.reconnect_initial_s:
            raise ValueError("reconnect_max_s must not be less than reconnect_initial_s")
        return self
