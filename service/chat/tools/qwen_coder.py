"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>,
with a line break behind every tag."""

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
from service.chat.tools.tagged import MAX_VALUE_CHARS, TaggedParser

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "parameter="
_VALUE_END = "</parameter>"


class QwenCoderParser(TaggedParser):
    name = "qwen3_coder"
    openers = (_CALL, _FUNCTION)
    closers = ("</tool_call>",)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(
            head=f"{_CALL}\n{_FUNCTION}",
            middle=">\n",
            tail="</function>\n</tool_call>",
            arguments=_parameters,
        )

    def _read(self, opener: str) -> Reading[None]:
        if opener == _CALL:
            yield from expect(_FUNCTION, (yield from skip_space()))
        self._begin_call((yield from read_until(">", MAX_HEAD_CHARS)).strip())
        while True:
            yield from expect("<", (yield from skip_space()))
            tag = yield from read_until(">", MAX_HEAD_CHARS)
            if tag == "/function":
                break
            if not tag.startswith(_PARAMETER):
                raise NotACallError
            raw = yield from read_until(_VALUE_END, MAX_VALUE_CHARS)
            self._add_argument(
                tag.removeprefix(_PARAMETER), raw.removeprefix("\n").removesuffix("\n")
            )
        self._end_call()


def _parameters(schema: Mapping[str, Any], lark: LarkRules) -> str:
    return named_arguments(schema, lark, separator="", value=_parameter)


def _parameter(name: str, schema: Mapping[str, Any], lark: LarkRules) -> str:
    head = lark.text(f"<{_PARAMETER}{name}>\n")
    value = raw_value(schema, f"\n{_VALUE_END}\n", lark)
    return lark.add(f"{head} {value}")
