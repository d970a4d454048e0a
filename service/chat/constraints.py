"""What a chat's tools mean for what the model may write."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.chat.options import ChatOptions, Tool
from service.chat.reasoning import ReasoningStyle
from service.chat.tools.grammar import (
    ANY_TEXT,
    CallSyntax,
    LarkRules,
    UnwritableSchemaError,
    calls_rule,
)
from service.chat.tools.parser import ToolParser
from service.tokenizer.constraints import JsonSchema, Marked

_ANY_ARGUMENTS = {"type": "object"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
_SPACE = r"/[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class ChatGrammars:
    """Of one model. token_ids: of marks that are tokens of it."""

    family: type[ToolParser] | None
    syntax: CallSyntax | None
    style: ReasoningStyle | None
    token_ids: Mapping[str, int]

    def of_calls(self, options: ChatOptions, *, is_open: bool) -> Marked | None:
        """None where everything may be written. is_open: the prompt ends within thinking.

        Raises UnwritableSchemaError.
        """
        if self.family is None or not options.tools:
            return None
        if self.syntax is None:
            if options.choice == "required" or any(tool.is_strict for tool in options.tools):
                raise _unwritable()
            return None
        lark = LarkRules(self.token_ids)
        if options.choice == "required":
            calls = calls_rule(
                self.syntax, options.tools, lark, is_parallel=options.is_parallel, opener=""
            )
            return lark.finish(self._thinking(lark, is_open=is_open) + calls)
        if not any(tool.is_strict for tool in options.tools):
            return None
        tools = tuple(
            tool if tool.is_strict else Tool(tool.name, _ANY_ARGUMENTS) for tool in options.tools
        )
        if self.style is not None and self.style.answer_head:
            return lark.finish(_messages_and_calls(tools, self.style, self.syntax, lark))
        return lark.finish(self._text_and_calls(tools, self.family, self.syntax, lark))

    def of_answer(self, schema: JsonSchema, options: ChatOptions, *, is_open: bool) -> Marked:
        """An answer that obeys the schema, or calls where there are tools.

        Raises UnwritableSchemaError, and ValueError where the schema is not JSON.
        """
        lark = LarkRules(self.token_ids)
        document = json.loads(schema.schema)
        if not isinstance(document, dict):
            raise UnwritableSchemaError("a schema is a JSON object")
        if schema.is_lenient:
            document = {**document, "x-guidance": {**_own_guidance(document), **_LENIENT}}
        start = lark.json(document)
        if options.tools and self.syntax is None:
            raise _unwritable()
        if options.tools and self.syntax is not None:
            calls = calls_rule(
                self.syntax, options.tools, lark, is_parallel=options.is_parallel, opener=""
            )
            head = lark.text("" if self.style is None else self.style.answer_head)
            start = f"({head} {start} | {calls})"
        elif self.style is not None and self.style.answer_head:
            start = f"{lark.text(self.style.answer_head)} {start}"
        return lark.finish(self._thinking(lark, is_open=is_open) + start)

    def _thinking(self, lark: LarkRules, *, is_open: bool) -> str:
        style = self.style
        if style is None or not (is_open or style.answer_head):
            return ""
        if not style.answer_head:
            return f"{lark.until(style.end)} {lark.add(_SPACE)} "
        rest = f"{lark.until(style.end)} {lark.text(style.between)}"
        return f"{rest} " if is_open else f"({lark.text(style.begin)} {rest})? "

    def _text_and_calls(
        self, tools: tuple[Tool, ...], family: type[ToolParser], syntax: CallSyntax, lark: LarkRules
    ) -> str:
        begin = syntax.begin or syntax.head
        opener = next((mark for mark in family.openers if begin.startswith(mark)), "")
        is_list = bool(syntax.begin)
        if not opener:
            calls = calls_rule(syntax, tools, lark, is_parallel=True, opener="")
            answer = lark.add(rf"/[^ \n{chr(92)}{family.first_chars}](.|\n)*/")
            return f"({answer} | {calls})"
        calls = calls_rule(syntax, tools, lark, is_parallel=is_list, opener=opener)
        marks = [lark.mark(text) for text in self._thinking_marks()]
        text = lark.add(" | ".join([ANY_TEXT, *marks]))
        if opener in self.token_ids:
            return f"{text}* ({lark.mark(opener)} {calls} {text}*)*"
        return f"({lark.until(opener)} {calls})* {text}*"

    def _thinking_marks(self) -> list[str]:
        style = self.style
        marks = () if style is None else (style.begin, style.end)
        return [mark for mark in marks if mark in self.token_ids]


def _unwritable() -> UnwritableSchemaError:
    return UnwritableSchemaError(
        "this model's calls are known by a regular expression, which no grammar can be made of"
    )


def _messages_and_calls(
    tools: tuple[Tool, ...], style: ReasoningStyle, syntax: CallSyntax, lark: LarkRules
) -> str:
    """Where everything is a message: some that are thoughts, and then calls or an answer."""
    thought = lark.add(
        f"{lark.text(style.begin)} {lark.until(style.end)} {lark.text(style.between)}"
    )
    calls = calls_rule(syntax, tools, lark, is_parallel=True, opener="")
    answer = f"{lark.text(style.answer_head)} {lark.add(ANY_TEXT)}?"
    return f"{thought}* ({answer} | {calls})"


def _own_guidance(document: dict[str, Any]) -> dict[str, Any]:
    own = document.get("x-guidance", {})
    return own if isinstance(own, dict) else {}
