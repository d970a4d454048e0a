"""What an engine can refuse or fail with. The service maps codes to HTTP and gRPC."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """One code per thing that can go wrong with a request inside the engine."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    ENGINE_DRAINING = "engine_draining"
    ENGINE_FAILED = "engine_failed"
    ENGINE_SLEEPING = "engine_sleeping"
    OUT_OF_MEMORY = "out_of_memory"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    INTERNAL = "internal"


class RequestRejectedError(Exception):
    """The engine will not take this request; nothing was allocated for it.

    code says why, message is safe to show to a client, param names the offending field if any.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def id_in_use(request_id: str) -> RequestRejectedError:
    """What a second live request of one id is told."""
    return RequestRejectedError(
        ErrorCode.INVALID_REQUEST, f"request id {request_id!r} is in use", "request_id"
    )


class EngineFailedError(Exception):
    """The engine cannot go on: a rank died or a step raised. The replica must be replaced."""


class IntegrityError(Exception):
    """Page accounting is broken: a page is lost, doubly owned or freed while in use."""


class ConfigError(ValueError):
    """A configuration that cannot work, with what to change."""


class ModelLoadError(Exception):
    """A model folder that cannot be served, with what is missing or unsupported."""


class AdapterError(Exception):
    """An adapter whose files cannot be served, with what is wrong. Names no path of the server."""
