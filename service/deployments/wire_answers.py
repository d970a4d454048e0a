"""Answers to connections that never become requests, and the protocol that refuses one.

What a request gets is service/api's. Errors look alike.
"""

import asyncio
from http import HTTPStatus

from service.api.openai.wire import encode_json
from service.errors import ApiError, ApiErrorCode

REFUSAL_TIMEOUT_S = 1.0
"""What a refused client has to read why."""


def wire_answer(error: ApiError) -> bytes:
    """A whole HTTP answer that closes its connection."""
    body = encode_json(error.to_openai())
    lines = [
        f"HTTP/1.1 {error.row.http_status} {HTTPStatus(error.row.http_status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"retry-after: {error.retry_after_s:.0f}")
    return "\r\n".join((*lines, "", "")).encode() + body


TOO_SLOW = wire_answer(ApiError(ApiErrorCode.REQUEST_TIMEOUT, "the request did not arrive in time"))
FULL = wire_answer(
    ApiError(ApiErrorCode.UNAVAILABLE, "the server holds as many connections as it may")
)


class RefusingProtocol(asyncio.Protocol):
    """Answers FULL, whatever is asked, and closes when the client does or has had its time.

    What the client has sent is read, for a connection that is closed over unread bytes is reset,
    and the answer may be lost. open_refusals: where it is while it is open.
    """

    def __init__(self, open_refusals: "set[RefusingProtocol]") -> None:
        self._open_refusals = open_refusals
        self._open_refusals.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(FULL)
        transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSAL_TIMEOUT_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_refusals.discard(self)
