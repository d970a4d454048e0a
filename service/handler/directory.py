"""Which models a client can reach, by the names that it writes. Knows no protocol, no replica."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from service.api.errors import ApiError, ApiErrorCode
from service.handler.handler import Handler
from service.limits import Limits
from workers.protocol import ModelInfo


class RefusalCounter(Protocol):
    """Counts requests that were refused before a model was found for them."""

    def on_rejected(self, code: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """is_ready: whether a request for it would be taken now."""

    name: str
    handler: Handler
    is_ready: Callable[[], bool]

    @property
    def info(self) -> ModelInfo | None:
        """Facts of the model; None before any of its replicas was seen."""
        try:
            return self.handler.model_info
        except ApiError:
            return None


class ModelDirectory:
    """The models that one route serves, at least one, and what is common to all of them."""

    def __init__(
        self, models: Sequence[ServedModel], limits: Limits, refusals: RefusalCounter
    ) -> None:
        self.limits = limits
        self._models = {model.name: model for model in models}
        self._refusals = refusals

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def pick(self, name: str) -> ServedModel:
        """The model of that name; "" is the only model there is. Raises ApiError."""
        if name:
            return self.find(name)
        if len(self._models) > 1:
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                f"several models are served; choose one of {', '.join(self._models)}",
                "model",
            )
        return next(iter(self))

    def find(self, name: str) -> ServedModel:
        """The model of exactly that name. Raises ApiError."""
        model = self._models.get(name)
        if model is None:
            raise ApiError(
                ApiErrorCode.MODEL_NOT_FOUND, f"the model {name[:128]!r} does not exist", "model"
            )
        return model

    def only(self, name: str) -> "ModelDirectory":
        """A directory of that model alone. Raises ApiError."""
        return ModelDirectory([self.find(name)], self.limits, self._refusals)

    def count_refusal(self, error: ApiError) -> None:
        """A request that never reaches a handler was refused."""
        self._refusals.on_rejected(error.code.value)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around what an API server does before Handler.start(), which counts by itself."""
        try:
            yield
        except ApiError as error:
            self.count_refusal(error)
            raise
