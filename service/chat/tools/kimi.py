"""Kimi K2: an id that has the function's name, and JSON, between marks."""

import re

from service.chat.reading import (
    MAX_HEAD_CHARS,
    NotACallError,
    Reading,
    expect,
    read_until,
    skip_space,
)
from service.chat.tools.grammar import CallSyntax
from service.chat.tools.parser import ToolParser

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_PREFIX = "functions."
_NUMBER = re.compile(r":\d{1,6}")


class KimiParser(ToolParser):
    """An id is "functions.", the name, and ":" with the call's number in the conversation."""

    name = "kimi_k2"
    openers = (_BEGIN, _CALL)
    closers = (_CALL_END, _END)
    inner_marks = (_ARGUMENTS,)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(
            head=_CALL + _PREFIX,
            infix="/:[0-9]{1,4}/",
            middle=_ARGUMENTS,
            tail=_CALL_END,
            begin=_BEGIN,
            separator="",
            end=_END,
        )

    def _read(self, opener: str) -> Reading[None]:
        if opener == _BEGIN:
            yield from expect(_CALL, (yield from skip_space()))
        call_id = (yield from read_until(_ARGUMENTS, MAX_HEAD_CHARS)).strip()
        name, colon, number = call_id.rpartition(":")
        if not _NUMBER.fullmatch(colon + number):
            name = call_id
        char = yield from skip_space()
        if char != "{":
            raise NotACallError
        self._announce(name.removeprefix(_PREFIX), call_id)
        yield from self._argue_json(char)
