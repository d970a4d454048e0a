"""Granite 3: a mark and a list of JSON objects."""

from service.chat.reading import Reading, skip_space
from service.chat.tools.call_objects import CallObjectParser
from service.chat.tools.grammar import CallSyntax


class GraniteParser(CallObjectParser):
    name = "granite"
    openers = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        mark = next((mark for mark in cls.openers if mark in template), cls.openers[0])
        return CallSyntax(
            head='{"name": "',
            middle='", "arguments": ',
            tail="}",
            begin=mark + "[",
            separator=", ",
            end="]",
        )

    def _read(self, opener: str) -> Reading[None]:
        yield from self._read_list((yield from skip_space()))
