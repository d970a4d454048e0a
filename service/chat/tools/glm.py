"""GLM-4.5 and later: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for
every argument, </tool_call>; a line break behind each, except in the latest versions."""

from collections.abc import Mapping
from typing import Any

from service.chat.reading import (
    MAX_HEAD_CHARS,
    NotACallError,
    Reading,
    expect,
    read_until,
    skip_space,
)
from service.chat.tools.grammar import CallSyntax, LarkRules
from service.chat.tools.named_arguments import named_arguments, raw_value
from service.chat.tools.tagged import MAX_VALUE_CHARS, TaggedParser, read_name

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(TaggedParser):
    name = "glm4"
    openers = (_CALL,)
    inner_marks = (_CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(head=_CALL, middle="\n", tail=_CALL_END, arguments=_arguments)

    def _read(self, opener: str) -> Reading[None]:
        name, char = yield from read_name((yield from skip_space()), "<\n", MAX_HEAD_CHARS)
        self._begin_call(name)
        while True:
            yield from expect("<", (yield from skip_space(char)))
            tag = "<" + (yield from read_until(">", MAX_HEAD_CHARS)) + ">"
            if tag == _CALL_END:
                break
            if tag != _KEY:
                raise NotACallError
            key = yield from read_until(_KEY_END, MAX_HEAD_CHARS)
            yield from expect(_VALUE, (yield from skip_space()))
            self._add_argument(key.strip(), (yield from read_until(_VALUE_END, MAX_VALUE_CHARS)))
            char = " "
        self._end_call()


def _arguments(schema: Mapping[str, Any], lark: LarkRules) -> str:
    return named_arguments(schema, lark, separator="", value=_argument)


def _argument(name: str, schema: Mapping[str, Any], lark: LarkRules) -> str:
    head = lark.text(f"{_KEY}{name}{_KEY_END}\n{_VALUE}")
    value = raw_value(schema, _VALUE_END, lark)
    return lark.add(f'{head} {value} "\\n"')
