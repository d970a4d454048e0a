"""Which models a client can reach, by the names that it writes. Knows no protocol, no replica."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from service.errors import ApiError, ApiErrorCode
from service.handler.handler import Handler
from service.limits import Limits
from service.observability.request_log.record import RequestRecord
from service.security.callers import Caller
from service.security.quota import Lease
from workers.engine.protocol import ModelInfo


class RefusalCounter(Protocol):
    """Counts requests that generated nothing."""

    def on_rejected(self, code: str) -> None: ...


class NamedAdapters(Protocol):
    """A model's adapters, each of which clients see as a model of its own."""

    def __iter__(self) -> Iterator["ServedModel"]: ...

    def find(self, name: str) -> "ServedModel | None": ...


class NoAdapters:
    def __iter__(self) -> Iterator["ServedModel"]:
        return iter(())

    def find(self, name: str) -> "ServedModel | None":
        return None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """is_ready: whether a request for it would be taken now. root: its hub id, or its name. parent:
    of an adapter, its model's name."""

    name: str
    handler: Handler
    is_ready: Callable[[], bool]
    root: str
    parent: str | None = None
    adapters: NamedAdapters = NoAdapters()

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
        """refusals: of requests for which no model was found."""
        self.limits = limits
        self._models = {model.name: model for model in models}
        self._refusals = refusals

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def every(self) -> Iterator[ServedModel]:
        """All names: each model, and then its adapters."""
        for model in self:
            yield model
            yield from model.adapters

    def pick(self, name: str, record: RequestRecord) -> Handler:
        """Of the model of that name, which the record notes; "" is the only model there is.

        Raises ApiError.
        """
        if not name and len(self._models) > 1:
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                f"several models are served; choose one of {', '.join(self._models)}",
                "model",
            )
        model = self.find(name) if name else next(iter(self))
        record.model = model.name
        return model.handler

    def find(self, name: str) -> ServedModel:
        """The model or adapter of exactly that name. Raises ApiError."""
        model = self._found(name)
        if model is None:
            raise ApiError(
                ApiErrorCode.MODEL_NOT_FOUND, f"the model {name[:128]!r} does not exist", "model"
            )
        return model

    def _found(self, name: str) -> ServedModel | None:
        if name in self._models:
            return self._models[name]
        found = (model.adapters.find(name) for model in self)
        return next((adapter for adapter in found if adapter is not None), None)

    def only(self, name: str) -> "ModelDirectory":
        """A directory of that model alone. Raises ApiError."""
        return ModelDirectory([self.find(name)], self.limits, self._refusals)

    def check_admission(self) -> None:
        """Raise ApiError if none of the models would take any request now.

        Asked before a request is read, so that a refusal costs nothing.
        """
        refusal: ApiError | None = None
        for model in self:
            try:
                model.handler.check_admission()
            except ApiError as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    @contextmanager
    def admitting(self, caller: Caller) -> Iterator[Lease]:
        """A request of the caller, counted before it is read; what fails gives its place back.

        Whoever runs the request ends the lease. Raises ApiError RATE_LIMITED.
        """
        lease = caller.quota.admit()
        try:
            yield lease
        except BaseException:
            lease.cancel()
            raise

    def count_refusal(self, record: RequestRecord) -> None:
        """A request is over: count it if it was refused, with its model if it had come so far.

        The one place that counts refusals. What was accepted has been told to its model's metrics.
        """
        if not record.error_code or record.is_accepted:
            return
        model = self._found(record.model)
        if model is None:
            self._refusals.on_rejected(record.error_code)
        else:
            model.handler.metrics.on_rejected(record.error_code)
