"""Which protocol's error a path answers with. Knows raw paths: refusals come before routes do."""

from typing import Any

from service.api.anthropic.errors import ANTHROPIC_TABLE, anthropic_error
from service.errors import ApiError

MESSAGES = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """Whether whoever asks for the path speaks Anthropic's API."""
    return MESSAGES in path


def shape_error(error: ApiError, path: str, request_id: str) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    if is_anthropic(path):
        return ANTHROPIC_TABLE[error.code].http_status, anthropic_error(error, request_id)
    return error.row.http_status, error.to_openai()
