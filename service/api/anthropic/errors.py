"""Errors as Anthropic's clients read them: the one table's codes with their statuses and types.

`code` and `param` stand beside `type` and `message`, so that a client sees one code whichever API
it speaks.
"""

from typing import Any

from service.errors import ApiError, ApiErrorCode, ErrorRow

_INVALID = "invalid_request_error"
_BAD_REQUEST = ErrorRow(400, _INVALID)
_NOT_FOUND = ErrorRow(404, "not_found_error")
_UNAVAILABLE = ErrorRow(503, "overloaded_error")

ANTHROPIC_TABLE: dict[ApiErrorCode, ErrorRow] = {
    ApiErrorCode.INVALID_REQUEST: _BAD_REQUEST,
    ApiErrorCode.INVALID_JSON: _BAD_REQUEST,
    ApiErrorCode.UNKNOWN_PARAMETER: _BAD_REQUEST,
    ApiErrorCode.UNSUPPORTED_PARAMETER: _BAD_REQUEST,
    ApiErrorCode.LIMIT_EXCEEDED: _BAD_REQUEST,
    ApiErrorCode.CONTEXT_LENGTH_EXCEEDED: _BAD_REQUEST,
    ApiErrorCode.INVALID_API_KEY: ErrorRow(401, "authentication_error"),
    ApiErrorCode.MODEL_NOT_FOUND: _NOT_FOUND,
    ApiErrorCode.RESPONSE_NOT_FOUND: _NOT_FOUND,
    ApiErrorCode.ROUTE_NOT_FOUND: _NOT_FOUND,
    ApiErrorCode.METHOD_NOT_ALLOWED: ErrorRow(405, _INVALID),
    ApiErrorCode.PAYLOAD_TOO_LARGE: ErrorRow(413, "request_too_large"),
    ApiErrorCode.UNSUPPORTED_MEDIA_TYPE: ErrorRow(415, _INVALID),
    ApiErrorCode.OVERLOADED: ErrorRow(529, "overloaded_error"),
    ApiErrorCode.RATE_LIMITED: ErrorRow(429, "rate_limit_error"),
    ApiErrorCode.UNAVAILABLE: _UNAVAILABLE,
    ApiErrorCode.DRAINING: _UNAVAILABLE,
    ApiErrorCode.MODEL_SLEEPING: _UNAVAILABLE,
    ApiErrorCode.REPLICA_LOST: _UNAVAILABLE,
    ApiErrorCode.TOKENIZER_FAILED: _UNAVAILABLE,
    ApiErrorCode.TIMEOUT: ErrorRow(504, "timeout_error"),
    ApiErrorCode.REQUEST_TIMEOUT: ErrorRow(408, "timeout_error"),
    ApiErrorCode.CLIENT_CLOSED_REQUEST: ErrorRow(499, _INVALID),
    ApiErrorCode.INTERNAL: ErrorRow(500, "api_error"),
}


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an Anthropic error."""
    return {
        "type": "error",
        "error": {
            "type": ANTHROPIC_TABLE[error.code].error_type,
            "message": error.message,
            "param": error.param,
            "code": error.code.value,
        },
        "request_id": request_id,
    }
