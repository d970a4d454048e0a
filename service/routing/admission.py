"""Admission control of one ingress process: how much it holds at once, and whether it is draining.

Pure accounting. Knows no transport: refusals are ApiErrors that HTTP and gRPC render.
"""

from pydantic import BaseModel, ConfigDict, Field

from service.errors import ApiError, ApiErrorCode
from service.routing.token_ledger import TokenLedger


class AdmissionSettings(BaseModel):
    """Ceilings of one ingress process.

    max_live_requests: sequences accepted and not ended. max_queued_tokens: tokens of sequences that
    no replica has begun to answer. reserved_share: of both, split evenly among the models and
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
        """Queued tokens that the model may have now, those that it has included."""
        others = (m.queued_tokens for m in self.models if m is not model)
        kept = sum(max(held, self._reserved_tokens) for held in others)
        return self.settings.max_queued_tokens - kept


class AdmissionControl:
    """The sequences of one model: admit() opens them in the ledger, where they are closed."""

    def __init__(self, ingress: IngressAdmission) -> None:
        self.ledger = TokenLedger()
        self._ingress = ingress

    @property
    def is_draining(self) -> bool:
        return self._ingress.is_draining

    @property
    def num_live_requests(self) -> int:
        return self.ledger.num_requests

    @property
    def queued_tokens(self) -> int:
        return self.ledger.queued_tokens

    def check(self) -> None:
        """Raise ApiError if nothing is admitted now: DRAINING or OVERLOADED."""
        if self.is_draining:
            raise self._error(ApiErrorCode.DRAINING, "the service is shutting down")
        if self.num_live_requests >= self._ingress.request_room(self):
            raise self._error(ApiErrorCode.OVERLOADED, "too many requests are being served")

    def admit(self, request_id: str, num_tokens: int) -> None:
        """Count a sequence in, or raise ApiError."""
        self.check()
        # A model with an empty queue takes any prompt: its length has its own limit.
        total_tokens = self.queued_tokens + num_tokens
        if self.queued_tokens and total_tokens > self._ingress.token_room(self):
            raise self._error(ApiErrorCode.OVERLOADED, "too many prompt tokens are queued")
        self.ledger.open(request_id, num_tokens)

    def _error(self, code: ApiErrorCode, message: str) -> ApiError:
        return ApiError(code, message, retry_after_s=self._ingress.settings.retry_after_s)
