"""Whether and where requests are traced. Imports no OpenTelemetry."""

import importlib.util

from pydantic import BaseModel, ConfigDict, Field

from workers.errors import ConfigError

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")


class TracingSettings(BaseModel):
    """endpoint: an OTLP collector's gRPC port; "https://" there uses TLS.

    sample_ratio: of the traces that begin here; a caller's own decision stands.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    is_enabled: bool = False
    endpoint: str = Field(default="http://127.0.0.1:4317", pattern=r"^https?://[^\s/]+$")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    service_name: str = Field(default="tessera", min_length=1)

    def check(self) -> None:
        """Raise ConfigError if tracing is wanted and its packages are not installed."""
        if self.is_enabled and not all(map(_is_installed, _PACKAGES)):
            raise ConfigError(
                "tracing.is_enabled needs OpenTelemetry: pip install 'tessera[tracing]'"
            )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
