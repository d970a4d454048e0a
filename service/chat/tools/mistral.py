"""Mistral: [TOOL_CALLS] and a list of JSON objects; later versions: [TOOL_CALLS] before every name
and [ARGS] before its arguments, with a [CALL_ID] between in some."""

from service.chat.reading import (
    MAX_HEAD_CHARS,
    NotACallError,
    Reading,
    read_until,
    skip_space,
)
from service.chat.tools.call_objects import CallObjectParser
from service.chat.tools.grammar import CallSyntax

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(CallObjectParser):
    name = "mistral"
    openers = (_MARK,)
    inner_marks = (_ID, _ARGUMENTS)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        if _ARGUMENTS in template:
            return CallSyntax(head=_MARK, middle=_ARGUMENTS, separator="")
        return CallSyntax(
            head='{"name": "',
            middle='", "arguments": ',
            tail="}",
            begin=_MARK + "[",
            separator=", ",
            end="]",
        )

    def _read(self, opener: str) -> Reading[None]:
        char = yield from skip_space()
        if char == "[":
            yield from self._read_list(char)
            return
        head = char + (yield from read_until(_ARGUMENTS, MAX_HEAD_CHARS))
        name, _, call_id = head.partition(_ID)
        char = yield from skip_space()
        if char != "{":
            raise NotACallError
        self._announce(name.strip(), call_id.strip())
        yield from self._argue_json(char)
