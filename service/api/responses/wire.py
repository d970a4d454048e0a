"""Responses and stream events as OpenAI's clients read them, encoded by msgspec. Pure data.

Fields of type Any hold values whose JSON was made before; see JsonParts.
"""

from typing import Any

from msgspec import Struct

from service.api.openai.wire import encode_json
from service.handler.events import Usage


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    """code: OpenAI's; type: ours, as everywhere else in `code`."""

    code: str
    message: str
    type: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseHead(Struct, kw_only=True):
    """A response without its output. status: in_progress, completed, incomplete, failed or
    cancelled. store: whether it is kept, as far as that is known."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Any = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: Any
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class OutputTextBody(Struct, frozen=True, tag="output_text", tag_field="type"):
    text: Any
    logprobs: Any
    annotations: tuple[()] = ()


class ReasoningTextBody(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: Any


class MessageBody(Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    status: str
    role: str = "assistant"
    content: list[Any]


class ReasoningBody(Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    id: str
    status: str
    summary: tuple[()] = ()
    content: list[Any]
    encrypted_content: None = None


class FunctionCallBody(Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: Any


class ResponseObject(ResponseHead, kw_only=True):
    """A whole response."""

    output: list[MessageBody | ReasoningBody | FunctionCallBody]


class ItemList(Struct, frozen=True):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class Event(Struct, kw_only=True):
    """sequence_number: set when it is sent."""

    type: str
    sequence_number: int = -1


class ResponseEvent(Event, kw_only=True):
    """response: created, in_progress, or how it ended."""

    response: Any


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: Any


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: Any


class TextDeltaEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: Any
    logprobs: Any = ()


class TextDoneEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    text: Any
    logprobs: Any = ()


class ReasoningDeltaEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: Any


class ReasoningDoneEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    text: Any


class ArgumentsDeltaEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    delta: Any


class ArgumentsDoneEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    arguments: Any


class ErrorEvent(Event, kw_only=True):
    code: str
    message: str
    param: str | None


def sse_head(event: Event) -> bytes:
    return b"event: %b\ndata: " % event.type.encode()


def small_event(event: Event) -> bytes:
    """A server-sent event whose JSON is quick to make."""
    return b"%b%b\n\n" % (sse_head(event), encode_json(event))


def response_usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        usage.num_prompt_tokens,
        InputTokensDetails(usage.num_cached_tokens),
        usage.num_output_tokens,
        OutputTokensDetails(num_reasoning_tokens),
        usage.num_total_tokens,
    )
