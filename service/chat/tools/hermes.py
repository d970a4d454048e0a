"""Hermes, Qwen 2.5 and 3, Granite 4 and many that are made like them:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from service.chat.reading import Reading, skip_space
from service.chat.tools.call_objects import CallObjectParser
from service.chat.tools.grammar import CallSyntax


class HermesParser(CallObjectParser):
    name = "hermes"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(
            head='<tool_call>\n{"name": "', middle='", "arguments": ', tail="}\n</tool_call>"
        )

    def _read(self, opener: str) -> Reading[None]:
        yield from self._read_call((yield from skip_space()))
