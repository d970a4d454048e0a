"""The gRPC status of every error code. What a code means says service/errors.py."""

import grpc

from service.errors import ApiErrorCode

GRPC_STATUS: dict[ApiErrorCode, grpc.StatusCode] = {
    ApiErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.INVALID_JSON: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.UNKNOWN_PARAMETER: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.UNSUPPORTED_PARAMETER: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.LIMIT_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.INVALID_API_KEY: grpc.StatusCode.UNAUTHENTICATED,
    ApiErrorCode.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ApiErrorCode.RESPONSE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ApiErrorCode.ROUTE_NOT_FOUND: grpc.StatusCode.UNIMPLEMENTED,
    ApiErrorCode.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    ApiErrorCode.PAYLOAD_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ApiErrorCode.UNSUPPORTED_MEDIA_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    ApiErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ApiErrorCode.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ApiErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ApiErrorCode.DRAINING: grpc.StatusCode.UNAVAILABLE,
    ApiErrorCode.MODEL_SLEEPING: grpc.StatusCode.UNAVAILABLE,
    ApiErrorCode.REPLICA_LOST: grpc.StatusCode.UNAVAILABLE,
    ApiErrorCode.TOKENIZER_FAILED: grpc.StatusCode.UNAVAILABLE,
    ApiErrorCode.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ApiErrorCode.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ApiErrorCode.CLIENT_CLOSED_REQUEST: grpc.StatusCode.CANCELLED,
    ApiErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}
