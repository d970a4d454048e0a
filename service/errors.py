"""One table of everything a request can end with: code, HTTP status, OpenAI type.

Knows no route and no transport. HTTP and gRPC render the same ApiError, so a client sees one code
whichever way it came; service/api/grpc_status.py has gRPC's statuses.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from workers.engine.protocol import OutputError
from workers.errors import ErrorCode, RequestRejectedError


class ApiErrorCode(StrEnum):
    """What a client may act upon. The values are the `code` of the OpenAI error object."""

    INVALID_REQUEST = "invalid_request"
    INVALID_JSON = "invalid_json"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    LIMIT_EXCEEDED = "limit_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    DRAINING = "draining"
    MODEL_SLEEPING = "model_sleeping"
    REPLICA_LOST = "replica_lost"
    TOKENIZER_FAILED = "tokenizer_failed"
    TIMEOUT = "timeout"
    REQUEST_TIMEOUT = "request_timeout"
    CLIENT_CLOSED_REQUEST = "client_closed_request"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one code looks over HTTP. error_type: the `type` of the error object."""

    http_status: int
    error_type: str


_INVALID = "invalid_request_error"
_BAD_REQUEST = ErrorRow(400, _INVALID)
_UNAVAILABLE = ErrorRow(503, "service_unavailable_error")

ERROR_TABLE: dict[ApiErrorCode, ErrorRow] = {
    ApiErrorCode.INVALID_REQUEST: _BAD_REQUEST,
    ApiErrorCode.INVALID_JSON: _BAD_REQUEST,
    ApiErrorCode.UNKNOWN_PARAMETER: _BAD_REQUEST,
    ApiErrorCode.UNSUPPORTED_PARAMETER: _BAD_REQUEST,
    ApiErrorCode.LIMIT_EXCEEDED: _BAD_REQUEST,
    ApiErrorCode.CONTEXT_LENGTH_EXCEEDED: _BAD_REQUEST,
    ApiErrorCode.INVALID_API_KEY: ErrorRow(401, "authentication_error"),
    ApiErrorCode.MODEL_NOT_FOUND: ErrorRow(404, _INVALID),
    ApiErrorCode.RESPONSE_NOT_FOUND: ErrorRow(404, _INVALID),
    ApiErrorCode.ROUTE_NOT_FOUND: ErrorRow(404, _INVALID),
    ApiErrorCode.METHOD_NOT_ALLOWED: ErrorRow(405, _INVALID),
    ApiErrorCode.PAYLOAD_TOO_LARGE: ErrorRow(413, _INVALID),
    ApiErrorCode.UNSUPPORTED_MEDIA_TYPE: ErrorRow(415, _INVALID),
    ApiErrorCode.OVERLOADED: ErrorRow(429, "rate_limit_error"),
    ApiErrorCode.RATE_LIMITED: ErrorRow(429, "rate_limit_error"),
    ApiErrorCode.UNAVAILABLE: _UNAVAILABLE,
    ApiErrorCode.DRAINING: _UNAVAILABLE,
    ApiErrorCode.MODEL_SLEEPING: _UNAVAILABLE,
    ApiErrorCode.REPLICA_LOST: _UNAVAILABLE,
    ApiErrorCode.TOKENIZER_FAILED: _UNAVAILABLE,
    ApiErrorCode.TIMEOUT: ErrorRow(504, "timeout_error"),
    ApiErrorCode.REQUEST_TIMEOUT: ErrorRow(408, "timeout_error"),
    ApiErrorCode.CLIENT_CLOSED_REQUEST: ErrorRow(499, _INVALID),
    ApiErrorCode.INTERNAL: ErrorRow(500, "server_error"),
}

# What a client is told to wait when the one who raised did not say; no other code is retryable.
_DEFAULT_RETRY_AFTER_S: dict[ApiErrorCode, float] = {
    ApiErrorCode.OVERLOADED: 1.0,
    ApiErrorCode.RATE_LIMITED: 1.0,
    ApiErrorCode.UNAVAILABLE: 2.0,
    ApiErrorCode.DRAINING: 1.0,
    ApiErrorCode.MODEL_SLEEPING: 10.0,
    ApiErrorCode.REPLICA_LOST: 1.0,
    ApiErrorCode.TOKENIZER_FAILED: 1.0,
}

_FROM_ENGINE: dict[ErrorCode, ApiErrorCode] = {
    ErrorCode.INVALID_REQUEST: ApiErrorCode.INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ApiErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.QUEUE_FULL: ApiErrorCode.OVERLOADED,
    ErrorCode.ENGINE_DRAINING: ApiErrorCode.DRAINING,
    ErrorCode.ENGINE_FAILED: ApiErrorCode.REPLICA_LOST,
    ErrorCode.ENGINE_SLEEPING: ApiErrorCode.MODEL_SLEEPING,
    ErrorCode.OUT_OF_MEMORY: ApiErrorCode.UNAVAILABLE,
    ErrorCode.ADAPTER_UNAVAILABLE: ApiErrorCode.MODEL_NOT_FOUND,
    ErrorCode.INTERNAL: ApiErrorCode.INTERNAL,
}


class ApiError(Exception):
    """The one way a request fails.

    message is shown to the client: it names no path, address or type of ours. param is the
    offending field. retry_after_s defaults by code and is None where retrying cannot help.
    """

    def __init__(
        self,
        code: ApiErrorCode,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = (
            _DEFAULT_RETRY_AFTER_S.get(code) if retry_after_s is None else retry_after_s
        )

    @property
    def row(self) -> ErrorRow:
        return ERROR_TABLE[self.code]

    def to_openai(self) -> dict[str, dict[str, str | None]]:
        """The body of an OpenAI error: {"error": {message, type, param, code}}."""
        return {
            "error": {
                "message": self.message,
                "type": self.row.error_type,
                "param": self.param,
                "code": self.code.value,
            }
        }


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Whatever is raised within names parameters as the client has written them. names: those of
    OpenAI's completions, by which everything else knows them, to the client's."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


def from_rejection(error: RequestRejectedError) -> ApiError:
    """What a client sees of an engine's refusal."""
    return ApiError(_FROM_ENGINE[error.code], error.message, error.param)


def from_output_error(error: OutputError) -> ApiError:
    """What a client sees of a request that failed after the engine had taken it."""
    return ApiError(_FROM_ENGINE[error.code], error.message)
