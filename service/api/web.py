"""What the HTTP API has for browsers and monitors beside its protocols. Knows no route."""

from dataclasses import dataclass, field
from typing import Protocol

from service.errors import ApiError, ApiErrorCode
from service.observability.live import LiveState
from service.page.files import PageFile
from service.security.cors import CorsSettings


class MetricsReader(Protocol):
    """The metrics of the whole application, about a second old. Both raise ApiError."""

    async def text(self) -> bytes:
        """In Prometheus' text format."""
        ...

    async def live(self) -> LiveState: ...


class NoMetrics:
    """For servers without an exporter: every question is refused."""

    async def text(self) -> bytes:
        raise self._refusal()

    async def live(self) -> LiveState:
        raise self._refusal()

    def _refusal(self) -> ApiError:
        return ApiError(ApiErrorCode.UNAVAILABLE, "nothing gathers metrics here")


@dataclass(frozen=True, slots=True)
class WebSurface:
    """page: its files by path, none where there is no page. has_metrics: whether /metrics is here
    too. reader: of what the page, /metrics and /load show."""

    cors: CorsSettings = CorsSettings()
    page: dict[str, PageFile] = field(default_factory=dict)
    has_metrics: bool = False
    reader: MetricsReader = NoMetrics()
