"""Admission control of one ingress process: how much it holds at once, and whether it is draining.

Pure accounting. Knows no transport: refusals are ApiErrors that HTTP and gRPC render.
"""

from pydantic import BaseModel, ConfigDict, Field

from service.api.errors import ApiError, ApiErrorCode


class AdmissionSettings(BaseModel):
    """Ceilings of one ingress process.

    max_live_requests: sequences accepted and not ended. max_queued_tokens: prompt tokens of
    sequences that have no output yet. retry_after_s: what refused clients are told to wait.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_live_requests: int = Field(default=4096, ge=1)
    max_queued_tokens: int = Field(default=1 << 22, ge=1)
    retry_after_s: float = Field(default=1.0, gt=0)


class AdmissionControl:
    """Counts sequences from admit() to release(). Single-threaded: the ingress's event loop."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._is_draining = False
        self._num_live = 0
        self._queued_tokens = 0

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_live_requests(self) -> int:
        return self._num_live

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    def begin_drain(self) -> None:
        """Refuse from now on; what was admitted may end."""
        self._is_draining = True

    def check(self) -> None:
        """Raise ApiError if nothing is admitted now: DRAINING or OVERLOADED."""
        if self._is_draining:
            raise self._error(ApiErrorCode.DRAINING, "the service is shutting down")
        if self._num_live >= self._settings.max_live_requests:
            raise self._error(ApiErrorCode.OVERLOADED, "too many requests are being served")

    def admit(self, num_prompt_tokens: int) -> None:
        """Count a sequence in, or raise ApiError."""
        self.check()
        # An idle ingress takes any prompt: its length has its own limit.
        queued_tokens = self._queued_tokens + num_prompt_tokens
        if self._queued_tokens and queued_tokens > self._settings.max_queued_tokens:
            raise self._error(ApiErrorCode.OVERLOADED, "too many prompt tokens are queued")
        self._num_live += 1
        self._queued_tokens = queued_tokens

    def start(self, num_prompt_tokens: int) -> None:
        """The sequence has its first output, or has ended without any."""
        self._queued_tokens -= num_prompt_tokens

    def release(self) -> None:
        """The sequence has ended."""
        self._num_live -= 1

    def _error(self, code: ApiErrorCode, message: str) -> ApiError:
        return ApiError(code, message, retry_after_s=self._settings.retry_after_s)
