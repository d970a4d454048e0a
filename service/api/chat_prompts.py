"""The prompt of a chat, made of messages and tools as templates read them. Knows no protocol."""

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from service.api.tool_sets import FunctionTool
from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile
from service.limits import Limits
from service.tokenizer.jobs import EncodeChat

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_EFFORTS: tuple[str, ...] = get_args(ReasoningEffort)
_KWARG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MAX_DEPTH = 64
MAX_ARGUMENT_VALUES = 1 << 15
"""Of all calls of a chat."""


def make_prompt(
    messages: list[dict[str, Any]],
    tools: Sequence[FunctionTool],
    template_kwargs: dict[str, Any],
    limits: Limits,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    images: Sequence[ImageFile] = (),
) -> EncodeChat:
    """messages, template_kwargs: as the template reads them. images: of the messages, in order.

    Raises ApiError for what is too large or cannot be sent to a tokenizer."""
    if any("tool_calls" in message for message in messages):
        check_sendable(messages, "messages")
    shown_tools = [tool.to_template() for tool in tools]
    check_sendable(shown_tools, "tools")
    check_template_kwargs(template_kwargs, limits)
    return EncodeChat(
        messages,
        tools=shown_tools,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
        template_kwargs=template_kwargs,
        images=list(images),
    )


def assistant_message(
    texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """As chat templates read it. calls: with their arguments as objects."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def check_num_parts(content: object, limits: Limits) -> None:
    """Raise ApiError if a message's content is a list of too many parts."""
    check_part_count(len(content) if isinstance(content, list) else 0, limits)


def check_part_count(num_parts: int, limits: Limits) -> None:
    """Raise ApiError if a message's content may not have so many parts."""
    if num_parts > limits.max_content_parts:
        raise ApiError(
            ApiErrorCode.LIMIT_EXCEEDED,
            f"a message may have at most {limits.max_content_parts} content parts",
            "messages",
        )


def check_sendable(value: Any, param: str) -> None:
    """Raise ApiError where it holds numbers or text that no other process can be sent."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, ValueError) as error:
        raise _invalid(f"{param}: a number or text in it is out of range", param) from error


def check_arguments(arguments: Sequence[Any], param: str) -> None:
    """Raise ApiError if arguments of calls, all together, have more values than are handled in a
    moment, or lists and objects in one another deeper than a template can write."""
    level, num_values = list(arguments), 0
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        num_values += len(level)
        if num_values > MAX_ARGUMENT_VALUES:
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, f"{param} have too many values", param)
        if not level:
            return
    raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, f"{param} are nested too deeply", param)


def effort_kwargs(effort: str, param: str = "reasoning_effort") -> dict[str, Any]:
    """Variables of the template that say so. Raises ApiError if there is no such effort."""
    if effort not in _EFFORTS:
        raise _invalid(f"an effort is one of {', '.join(_EFFORTS)}", param)
    kwargs: dict[str, Any] = {"reasoning_effort": effort}
    return {**kwargs, "enable_thinking": False} if effort == "none" else kwargs


def check_template_kwargs(kwargs: dict[str, Any], limits: Limits) -> None:
    """Raise ApiError unless they are few, small and properly named."""
    param = "chat_template_kwargs"
    if len(kwargs) > limits.max_template_kwargs:
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, "too many chat_template_kwargs", param)
    if not all(_KWARG_NAME.fullmatch(name) for name in kwargs):
        raise _invalid("chat_template_kwargs must be named by identifiers", param)
    try:
        size = len(msgspec.msgpack.encode(kwargs))
    except (OverflowError, RecursionError) as error:
        raise _invalid("chat_template_kwargs are out of range", param) from error
    if size > limits.max_template_kwargs_bytes:
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, "chat_template_kwargs are too large", param)


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
