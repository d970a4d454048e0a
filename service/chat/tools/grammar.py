"""Grammars of tool calls: Lark of llguidance around the schemas of the functions' arguments."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.chat.options import Tool
from service.limits import MAX_GRAMMAR_BYTES
from service.tokenizer.constraints import Mark, Marked

ANY_TEXT = r"/(.|\n)+/"
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class UnwritableSchemaError(Exception):
    """The format cannot hold arguments to such a schema. The message may go to a client."""


@dataclass(slots=True)
class LarkRules:
    """A grammar under construction. token_ids: of texts that are tokens of the model, by text."""

    token_ids: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    num_bytes: int = 0
    marks: dict[str, Mark] = field(default_factory=dict)

    def add(self, expression: str) -> str:
        """The name of a new rule. Raises UnwritableSchemaError where that makes them too many, as
        definitions do that stand once for every argument."""
        return self._add(f"rule_{len(self.rules)}", expression)

    def terminal(self, expression: str) -> str:
        """As add(), of texts and regular expressions that are matched as one."""
        return self._add(f"TEXT_{len(self.rules)}", expression)

    def _add(self, name: str, expression: str, options: str = "") -> str:
        self._count(_utf8_bytes(expression))
        self.rules.append(f"{name}{options}: {expression}")
        return name

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_GRAMMAR_BYTES:
            raise UnwritableSchemaError(
                f"it makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            )

    def text(self, text: str) -> str:
        """An expression of just this text, with its marks as marks. Its characters are counted here
        already: a text may be written in many places before one of them becomes a rule. Raises
        UnwritableSchemaError where that makes them too many."""
        self._count(len(text))
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(self.token_ids, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(self._part(part) for part in parts if part)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Compact, as all JSON that is asked for; a schema's own x-guidance says otherwise."""
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict):
            raise UnwritableSchemaError("x-guidance is an object")
        styled = {**schema, "x-guidance": {**_JSON_STYLE, **own}}
        return self.add("%json " + json.dumps(styled, ensure_ascii=False))

    def until(self, end: str, *others: str) -> str:
        """Any text, and then the end, which is a mark or a text that stands for none of it; or one
        of several texts."""
        if end in self.token_ids:
            return f"{self.add(ANY_TEXT)}? {self.mark(end)}"
        ends = " | ".join(map(json.dumps, (end, *others)))
        return self._add(f"rule_{len(self.rules)}", f"/(.|\\n)*/ ({ends})", "[lazy]")

    def finish(self, start: str) -> Marked:
        return Marked("\n".join([f"start: {start}", *self.rules]), tuple(self.marks.values()))

    def mark(self, text: str) -> str:
        token_id = self.token_ids.get(text)
        mark = Mark(f"mark_{len(self.marks)}", text, token_id)
        return self.marks.setdefault(text, mark).rule

    def _part(self, part: str) -> str:
        return self.mark(part) if part in self.token_ids else json.dumps(part)


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UnwritableSchemaError("half of a surrogate pair is no text") from error


ArgumentRule = Callable[[Mapping[str, Any], LarkRules], str]


def json_arguments(schema: Mapping[str, Any], lark: LarkRules) -> str:
    return lark.json(schema)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A call is head, the function's name, infix, middle, its arguments, tail; calls stand between
    begin and end, with separators. infix: an expression of Lark, others are texts."""

    head: str
    middle: str
    tail: str = ""
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    arguments: ArgumentRule = json_arguments
    infix: str = ""


def calls_rule(
    syntax: CallSyntax, tools: Sequence[Tool], lark: LarkRules, *, is_parallel: bool, opener: str
) -> str:
    """One call or more. opener: text that stands before them already."""
    calls = [_call(syntax, tool, lark, "" if syntax.begin else opener) for tool in tools]
    first = lark.add(" | ".join(calls))
    parts = [lark.text(syntax.begin.removeprefix(opener)), first]
    if is_parallel:
        call = lark.add(" | ".join(_call(syntax, t, lark, "") for t in tools)) if opener else first
        parts.append(f"({lark.text(syntax.separator)} {call})*")
    return lark.add(" ".join([*parts, lark.text(syntax.end)]))


def _call(syntax: CallSyntax, tool: Tool, lark: LarkRules, opener: str) -> str:
    head = lark.text((syntax.head + tool.name).removeprefix(opener))
    head = " ".join(filter(None, (head, syntax.infix, lark.text(syntax.middle))))
    arguments = syntax.arguments(tool.parameters, lark)
    return lark.add(f"{head} {arguments} {lark.text(syntax.tail)}")
