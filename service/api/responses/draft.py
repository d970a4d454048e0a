"""Draft: a response as clients and the store read it, from its request to how it ended."""

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from service.api.openai.json_parts import JsonParts
from service.api.openai.wire import encode_json
from service.api.responses.output import IN_PROGRESS, OutputItem
from service.api.responses.requests import ResponsesRequest, SchemaFormat
from service.api.responses.tools import FunctionToolParam
from service.api.responses.wire import (
    IncompleteDetails,
    ResponseError,
    ResponseHead,
    ResponseUsage,
)
from service.errors import ApiError, ApiErrorCode
from service.handler.generation import Generation

CANCELLED, FAILED = "cancelled", "failed"
_KEY_BYTES = 24
_OPENAI_CODES = {
    ApiErrorCode.RATE_LIMITED: "rate_limit_exceeded",
    ApiErrorCode.OVERLOADED: "rate_limit_exceeded",
    ApiErrorCode.INVALID_REQUEST: "invalid_prompt",
    ApiErrorCode.CONTEXT_LENGTH_EXCEEDED: "invalid_prompt",
}


def make_key() -> str:
    """What names a response. Nobody can guess it."""
    return secrets.token_hex(_KEY_BYTES)


def response_id_of(key: str) -> str:
    return f"resp_{key}"


def failure_body(error: ApiError) -> ResponseError:
    code = _OPENAI_CODES.get(error.code, "server_error")
    return ResponseError(code, error.message, error.code.value)


class Draft:
    """head: fields change as the response goes on; then ask for its JSON again."""

    def __init__(self, request: ResponsesRequest, key: str, generation: Generation) -> None:
        info, sampling = generation.info, generation.request.sampling
        self.id = response_id_of(key)
        self._instructions = request.instructions
        self._tools = request.tools or []
        self._instructions_json: list[bytes] = []
        self._tools_json: list[bytes] = []
        self.head = ResponseHead(
            id=self.id,
            created_at=info.created_s,
            status=IN_PROGRESS,
            background=bool(request.background),
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            model=info.model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=_reasoning(request),
            safety_identifier=request.safety_identifier,
            store=request.is_stored,
            temperature=sampling.temperature,
            text=_text(request),
            tool_choice=_tool_choice(request),
            tools=[],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            user=request.user,
        )

    def prepare(self) -> Iterator[bytes]:
        """Before anything else: what is long of the request, once. Others may run between two
        pieces."""
        parts = JsonParts()
        text = None if self._instructions is None else parts.text(self._instructions)
        for piece in parts.pieces(text):
            self._instructions_json.append(piece)
            yield piece
        for piece in _array(self._tools):
            self._tools_json.append(piece)
            yield piece

    def end(
        self,
        status: str,
        completed_s: int,
        usage: ResponseUsage | None,
        failure: ApiError | None = None,
        cut: str = "",
    ) -> None:
        """cut: what has made it incomplete."""
        head = self.head
        head.status, head.usage = status, usage
        head.completed_at = completed_s if status == "completed" else None
        head.error = None if failure is None else failure_body(failure)
        head.incomplete_details = IncompleteDetails(cut) if status == "incomplete" else None

    def fail(self, failure: ApiError) -> None:
        """It has ended, and then failed."""
        head = self.head
        head.status, head.error = FAILED, failure_body(failure)
        head.completed_at = head.incomplete_details = None

    def head_json(self) -> list[bytes]:
        parts = JsonParts()
        self.head.instructions = parts.made(self._instructions_json)
        self.head.tools = parts.made(self._tools_json)
        return list(parts.pieces(self.head))

    def json(self, items: list[OutputItem]) -> list[bytes]:
        """The whole response. items: sealed."""
        return with_output(self.head_json(), output_json(items))


def output_json(items: list[OutputItem]) -> list[bytes]:
    """A JSON array. items: sealed."""
    pieces = [b"["]
    for item in items:
        if item.index:
            pieces.append(b",")
        pieces += item.item_json
    return [*pieces, b"]"]


def with_output(head: list[bytes], output: list[bytes]) -> list[bytes]:
    """The JSON of a response. head: of an object."""
    return [*head[:-1], head[-1][:-1], b',"output":', *output, b"}"]


def _array(tools: list[FunctionToolParam]) -> Iterator[bytes]:
    yield b"["
    for index, tool in enumerate(tools):
        yield (b"," if index else b"") + encode_json(tool.to_wire())
    yield b"]"


def _reasoning(request: ResponsesRequest) -> dict[str, Any]:
    asked = request.reasoning
    return {
        "effort": None if asked is None else asked.effort,
        "summary": None if asked is None else asked.summary or asked.generate_summary,
    }


def _text(request: ResponsesRequest) -> dict[str, Any]:
    asked = request.text
    form: dict[str, Any] = {"type": "text"}
    if asked is not None and isinstance(asked.format, SchemaFormat):
        form = {
            "type": "json_schema",
            "name": asked.format.name,
            "description": asked.format.description,
            "schema": msgspec.json.decode(asked.format.schema_),
            "strict": asked.format.strict is not False,
        }
    elif asked is not None and asked.format is not None:
        form = {"type": asked.format.type}
    verbosity = None if asked is None else asked.verbosity
    return {"format": form, "verbosity": verbosity or "medium"}


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump()
