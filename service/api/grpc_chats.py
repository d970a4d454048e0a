"""Chats of the gRPC API to the handler's values: messages, tools, and what may be called.

What holds for tools is said once, in service.api.openai.tools. Knows no server.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from service.api.body import MAX_INLINE_BYTES
from service.api.chat_prompts import (
    check_part_count,
    check_template_kwargs,
    effort_kwargs,
    make_prompt,
)
from service.api.grpc_images import images_in, to_content
from service.api.json_shape import measure
from service.api.openai.parameters import from_validation_error
from service.api.openai.tools import (
    FunctionCall,
    ToolCall,
    ToolParameters,
    check_calls,
)
from service.chat.options import ChatOptions
from service.errors import ApiError, ApiErrorCode
from service.handler.checks import check_num_messages
from service.limits import MAX_OTHER_ITEMS, MAX_TOOLS, Limits
from service.proto import inference_pb2 as pb
from service.tokenizer.jobs import EncodeChat

# Parsed in a few milliseconds, in which no other thread runs.
_MAX_SCHEMA_CHARS = 256 << 10
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TOOL_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: None,
    pb.TOOL_CHOICE_AUTO: "auto",
    pb.TOOL_CHOICE_NONE: "none",
    pb.TOOL_CHOICE_REQUIRED: "required",
}


def to_chat_options(chat: pb.Chat, limits: Limits) -> ChatOptions:
    """Raises ApiError."""
    return _to_tool_parameters(chat, limits).to_chat_options(limits)


def to_chat_prompt(chat: pb.Chat, limits: Limits) -> EncodeChat:
    """Raises ApiError."""
    # Before each of them is looked at: a request may hold millions.
    check_num_messages(len(chat.messages), limits)
    for message in chat.messages:
        check_part_count(len(message.parts), limits)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise _invalid(
            "continue_final_message excludes add_generation_prompt", "continue_final_message"
        )
    calls = [_to_call(call) for message in chat.messages for call in message.tool_calls]
    _check_escapes(calls, limits)
    check_calls(calls)
    return make_prompt(
        [_to_message(message) for message in chat.messages],
        _to_tool_parameters(chat, limits).tool_set.shown,
        {**_to_effort(chat), **_to_template_kwargs(chat, limits)},
        limits,
        add_generation_prompt=chat.add_generation_prompt
        or not chat.HasField("add_generation_prompt"),
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
        images=images_in(chat),
    )


def _check_escapes(calls: Sequence[ToolCall], limits: Limits) -> None:
    """A parser takes them one by one, and no other thread runs while it does."""
    if sum(call.function.arguments.count("\\") for call in calls) > limits.max_body_escapes:
        param = "messages.tool_calls.function.arguments"
        message = f"{param} may have at most {limits.max_body_escapes} escaped characters in all"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, param)


def _to_tool_parameters(chat: pb.Chat, limits: Limits) -> ToolParameters:
    # Before any schema is read: the objects of thousands keep the collector, and with it the loop.
    if len(chat.tools) > MAX_TOOLS:
        message = f"at most {MAX_TOOLS} tools are allowed"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")
    _check_schemas([tool.parameters_json for tool in chat.tools], limits)
    given: dict[str, Any] = {
        name: getattr(chat, name)
        for name in ("parallel_tool_calls", "include_reasoning", "thinking_token_budget")
        if chat.HasField(name)
    }
    try:
        return ToolParameters.model_validate(
            {
                **given,
                "tools": [{"type": "function", "function": _to_function(t)} for t in chat.tools],
                "tool_choice": _to_tool_choice(chat),
            }
        )
    except ValidationError as error:
        raise from_validation_error(error) from error


def _check_schemas(texts: Sequence[str], limits: Limits) -> None:
    """As bodies over HTTP are judged, by their shape if they are large. Raises ApiError."""
    num_chars = sum(map(len, texts))
    _require_at_most(_MAX_SCHEMA_CHARS, num_chars, "characters")
    if num_chars <= MAX_INLINE_BYTES:
        return
    shapes = [measure(text.encode("utf-8")) for text in texts]
    _require_at_most(MAX_OTHER_ITEMS, sum(shape.num_items for shape in shapes), "values in lists")
    num_nodes = sum(shape.num_nodes for shape in shapes)
    _require_at_most(limits.max_body_nodes, num_nodes, "lists, objects and named fields")


def _require_at_most(most: int, found: int, what: str) -> None:
    if found > most:
        message = f"parameters_json of all tools may have at most {most} {what}"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")


def _to_function(tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = _to_object(tool.parameters_json, "tools.parameters_json")
    return function


def _to_tool_choice(chat: pb.Chat) -> Any:
    if chat.WhichOneof("choice") == "tool_choice_function":
        return {"type": "function", "function": {"name": chat.tool_choice_function}}
    if chat.tool_choice not in _TOOL_CHOICES:
        raise _invalid(f"there is no tool_choice {chat.tool_choice}", "tool_choice")
    return _TOOL_CHOICES[chat.tool_choice]


def _to_call(call: pb.ToolCall) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def _to_message(message: pb.Message) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise _invalid(f"a role is one of {', '.join(_ROLES)}", "messages.role")
    if message.tool_calls and role != "assistant":
        raise _invalid("only an assistant calls tools", "messages.tool_calls")
    if (role == "tool") != message.HasField("tool_call_id"):
        text = "a message of role tool has a tool_call_id, and no other has"
        raise _invalid(text, "messages.tool_call_id")
    result: dict[str, Any] = {"role": role, "content": to_content(message)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if message.HasField(name):
            result[name] = getattr(message, name)
    if message.tool_calls:
        result["tool_calls"] = [_to_call(call).to_template() for call in message.tool_calls]
    return result


def _to_effort(chat: pb.Chat) -> dict[str, Any]:
    return effort_kwargs(chat.reasoning_effort) if chat.HasField("reasoning_effort") else {}


def _to_template_kwargs(chat: pb.Chat, limits: Limits) -> dict[str, Any]:
    if not chat.HasField("template_kwargs_json"):
        return {}
    param = "template_kwargs_json"
    if len(chat.template_kwargs_json) > limits.max_template_kwargs_bytes:
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, "template_kwargs_json is too large", param)
    kwargs = _to_object(chat.template_kwargs_json, param)
    check_template_kwargs(kwargs, limits)
    return kwargs


def _to_object(text: str, param: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(f"{param} must be a JSON object", param) from error


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
