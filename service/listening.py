"""Where the service listens and is scraped: HTTP, gRPC, metrics. Knows no model."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.api.unknown_fields import UnknownFieldsPolicy
from service.security.connections import GrpcConnectionLimits, HttpConnectionLimits
from service.security.cors import CorsSettings
from service.security.loopback import is_loopback
from service.security.tls import TlsSettings


class FrozenSettings(BaseModel):
    """Unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class HttpSettings(FrozenSettings):
    """Where HTTP is served and who accepts the connections.

    proxy "direct": each ingress replica listens itself, sharing the port. "serve": Ray Serve's
    Python proxy. "haproxy": Ray Serve's HAProxy mode, which also opens its statistics and metrics
    ports on every interface (docs/decisions/0020-http-proxy.md). connections, tls: of the ingress's
    own listeners, so for "direct" only. unknown_fields: what becomes of names in bodies that are no
    parameter. page: the page at "/"; None has it where only this machine can ask. metrics: whether
    /metrics answers here too.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    proxy: Literal["direct", "serve", "haproxy"] = "direct"
    keep_alive_timeout_s: int = Field(default=90, ge=1)
    unknown_fields: UnknownFieldsPolicy = "refuse"
    connections: HttpConnectionLimits = HttpConnectionLimits()
    tls: TlsSettings | None = None
    page: bool | None = None
    metrics: bool = False
    cors: CorsSettings = CorsSettings()

    @property
    def has_page(self) -> bool:
        """A proxy in front may let others in, wherever the ingress listens."""
        is_private = self.proxy == "direct" and is_loopback(self.host)
        return is_private if self.page is None else self.page

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls is not None and self.proxy != "direct":
            raise ValueError('tls needs proxy "direct": the proxies of Ray Serve speak plain HTTP')
        return self


class GrpcSettings(FrozenSettings):
    """Where gRPC is served; every ingress replica of a node shares the port."""

    host: str = "127.0.0.1"
    port: int = Field(default=9000, ge=1, le=65535)
    connections: GrpcConnectionLimits = GrpcConnectionLimits()
    tls: TlsSettings | None = None


class MetricsSettings(FrozenSettings):
    """Where Prometheus scrapes, and how often processes push to there.

    peak_bytes_per_s, peak_flops_per_s: limits of one device, for the roofline ratio; both or none,
    which takes what was measured on a GPU of that name, where something was.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=9400, ge=1, le=65535)
    push_interval_s: float = Field(default=1.0, gt=0)
    expire_after_s: float = Field(default=15.0, gt=0)
    peak_bytes_per_s: float | None = Field(default=None, gt=0)
    peak_flops_per_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.peak_bytes_per_s is None) != (self.peak_flops_per_s is None):
            raise ValueError("give both peak_bytes_per_s and peak_flops_per_s, or neither")
        return self
