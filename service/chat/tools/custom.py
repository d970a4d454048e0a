"""Calls as an operator describes them: by a template of one, or marks and a regular expression."""

import json
import logging
from typing import Any, Self

import regex
from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.chat.reading import MAX_HEAD_CHARS, NotACallError, Reading, read_until, skip_space
from service.chat.tools.grammar import CallSyntax
from service.chat.tools.parser import ToolParser

MAX_CALL_CHARS = 1 << 16
MAX_MATCH_S = 0.01
"""Of a processor, for one text: models write what clients have them write."""
_log = logging.getLogger(__name__)
_NAME, _ARGUMENTS = "{name}", "{arguments}"


class CustomToolCalls(BaseModel):
    """template: one call as the model writes it, with {name} where the function's name stands and
    {arguments} where its JSON does, as in <call f={name}>{arguments}</call>: such calls are told as
    they come, and can be forced. Or else begin and end, the texts around what is between, which
    pattern has to match as a whole, with groups called name and arguments: such calls are told when
    they are whole, and cannot be forced.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str | None = Field(default=None, max_length=1024)
    begin: str | None = Field(default=None, min_length=1, max_length=256)
    end: str | None = Field(default=None, min_length=1, max_length=256)
    pattern: str | None = Field(default=None, max_length=4096)

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        others = (self.begin, self.end, self.pattern)
        if self.template is not None:
            if any(other is not None for other in others):
                raise ValueError("give template, or begin, end and pattern")
            _parts(self.template)
        elif None in others:
            raise ValueError("begin, end and pattern are needed where there is no template")
        else:
            _compiled(self.pattern or "")
        return self

    def to_parser(self) -> type[ToolParser]:
        if self.template is not None:
            return _by_template(self.template)
        return _by_pattern(self.begin or "", self.end or "", self.pattern or "")


def _parts(template: str) -> tuple[str, str, str]:
    """What stands before the name, before the arguments, and behind. Raises ValueError."""
    head, _, rest = template.partition(_NAME)
    middle, found, tail = rest.partition(_ARGUMENTS)
    if not (head.strip() and middle and found) or _NAME in rest or _ARGUMENTS in head + tail:
        raise ValueError(
            f"a template has a text, {_NAME}, a text and {_ARGUMENTS}, in this order and each once"
        )
    return head, middle, tail


def _compiled(pattern: str) -> "regex.Pattern[str]":
    """Raises ValueError."""
    try:
        made = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from error
    if not {"name", "arguments"} <= made.groupindex.keys():
        raise ValueError("pattern needs groups called name and arguments")
    return made


def _by_template(template: str) -> type[ToolParser]:
    head, middle, tail = _parts(template)
    end = tail.strip()

    class TemplateParser(ToolParser):
        name = "custom"
        openers = (head,)
        closers = (end,) if end else ()
        inner_marks = (middle,)

        @classmethod
        def syntax(cls, template: str) -> CallSyntax:
            return CallSyntax(head=head, middle=middle, tail=tail)

        def _read(self, opener: str) -> Reading[None]:
            name = (yield from read_until(middle, MAX_HEAD_CHARS)).strip()
            char = yield from skip_space()
            if char != "{":
                raise NotACallError
            self._announce(name)
            yield from self._argue_json(char)

    return TemplateParser


def _by_pattern(begin: str, end: str, pattern: str) -> type[ToolParser]:
    compiled = _compiled(pattern)

    class PatternParser(ToolParser):
        name = "custom"
        openers = (begin,)
        inner_marks = (end,)
        # Of a choice whose text has taken too long once nothing more is matched.
        _gives_up = False

        @classmethod
        def syntax(cls, template: str) -> None:
            return None

        def _match(self, text: str) -> "regex.Match[str] | None":
            try:
                return None if self._gives_up else compiled.fullmatch(text, timeout=MAX_MATCH_S)
            except TimeoutError:
                self._gives_up = True
                _log.warning("custom_tool_calls.pattern is slow on %d characters", len(text))
                return None

        def _read(self, opener: str) -> Reading[None]:
            found = self._match((yield from read_until(end, MAX_CALL_CHARS)))
            if found is None:
                raise NotACallError
            arguments = (found["arguments"] or "").strip() or "{}"
            if not isinstance(_value_of(arguments), dict):
                raise NotACallError
            self._announce((found["name"] or "").strip())
            self._conclude(arguments)

    return PatternParser


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error
