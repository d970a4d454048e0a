"""Llama 3.1 to 3.3: an answer that is a JSON object {"name": ..., "parameters": {...}}; several
with semicolons between."""

from service.chat.reading import Reading, skip_space
from service.chat.tools.call_objects import CallObjectParser
from service.chat.tools.grammar import CallSyntax


class LlamaJsonParser(CallObjectParser):
    name = "llama3_json"
    openers = ("<|python_tag|>",)
    first_chars = "{"

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(head='{"name": "', middle='", "parameters": ', tail="}", separator="; ")

    def _read(self, opener: str) -> Reading[str]:
        return (yield from self._read_separated((yield from skip_space()), ";"))
