"""Admission control of one ingress process: how much it holds at once, and whether it is draining.

Pure accounting. Knows no transport: refusals are ApiErrors that HTTP and gRPC render.
"""

from pydantic import BaseModel, ConfigDict, Field

from service.api.errors import ApiError, ApiErrorCode


class AdmissionSettings(BaseModel):
    """Ceilings of one ingress process.

    max_live_requests: sequences accepted and not ended. max_queued_tokens: prompt tokens of
    sequences that have no output yet. reserved_share: of both, split evenly among the models and
    kept for each, so that a crowd before one model leaves room for the others; with one model it
    changes nothing. retry_after_s: what refused clients are told to wait.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_live_requests: int = Field(default=4096, ge=1)
    max_queued_tokens: int = Field(default=1 << 22, ge=1)
    reserved_share: float = Field(default=0.5, ge=0, le=1)
    retry_after_s: float = Field(default=1.0, gt=0)


class IngressAdmission:
    """The ceilings of an ingress and what its models hold of them. One event loop."""

    def __init__(self, settings: AdmissionSettings, num_models: int = 1) -> None:
        self.settings = settings
        self.is_draining = False
        share = settings.reserved_share / num_models
        self._reserved_requests = int(settings.max_live_requests * share)
        self._reserved_tokens = int(settings.max_queued_tokens * share)
        self.models = tuple(AdmissionControl(self) for _ in range(num_models))

    @property
    def num_live_requests(self) -> int:
        return sum(model.num_live_requests for model in self.models)

    def begin_drain(self) -> None:
        """Refuse from now on; what was admitted may end."""
        self.is_draining = True

    def request_room(self, model: "AdmissionControl") -> int:
        """Sequences that the model may hold now, those that it holds included."""
        others = (m.num_live_requests for m in self.models if m is not model)
        kept = sum(max(held, self._reserved_requests) for held in others)
        return self.settings.max_live_requests - kept

    def token_room(self, model: "AdmissionControl") -> int:
        """Queued prompt tokens that the model may have now, those that it has included."""
        others = (m.queued_tokens for m in self.models if m is not model)
        kept = sum(max(held, self._reserved_tokens) for held in others)
        return self.settings.max_queued_tokens - kept


class AdmissionControl:
    """Counts the sequences of one model from admit() to release()."""

    def __init__(self, ingress: IngressAdmission) -> None:
        self._ingress = ingress
        self._num_live = 0
        self._queued_tokens = 0

    @property
    def is_draining(self) -> bool:
        return self._ingress.is_draining

    @property
    def num_live_requests(self) -> int:
        return self._num_live

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    def check(self) -> None:
        """Raise ApiError if nothing is admitted now: DRAINING or OVERLOADED."""
        if self.is_draining:
            raise self._error(ApiErrorCode.DRAINING, "the service is shutting down")
        if self._num_live >= self._ingress.request_room(self):
            raise self._error(ApiErrorCode.OVERLOADED, "too many requests are being served")

    def admit(self, num_prompt_tokens: int) -> None:
        """Count a sequence in, or raise ApiError."""
        self.check()
        # A model with an empty queue takes any prompt: its length has its own limit.
        queued_tokens = self._queued_tokens + num_prompt_tokens
        if self._queued_tokens and queued_tokens > self._ingress.token_room(self):
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
        return ApiError(code, message, retry_after_s=self._ingress.settings.retry_after_s)
