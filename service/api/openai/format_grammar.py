"""A structural_tag's format as a grammar.

Free text ends where what stands behind it begins, so a format is written together with the text
that follows it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from service.api.openai.structural_formats import (
    AnyText,
    ConstString,
    Format,
    JsonFormat,
    Or,
    RegexFormat,
    Sequence,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)
from service.chat.tools.grammar import LarkRules, UnwritableSchemaError
from service.tokenizer.constraints import Marked

ALL_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Behind:
    """What stands behind a format and is written with it: one of the texts. is_last: nothing comes
    after that."""

    texts: tuple[str, ...] = ()
    is_last: bool = False


def format_grammar(form: Format) -> Marked:
    """Raises UnwritableSchemaError."""
    lark = LarkRules({})
    return lark.finish(_Writer(lark).write(form, Behind(is_last=True)) or '""')


class _Writer:
    """Methods give expressions of Lark, of the format and what stands behind it."""

    def __init__(self, lark: LarkRules) -> None:
        self._lark = lark

    def write(self, form: Format, behind: Behind, *, is_begun: bool = False) -> str:
        """is_begun: its first text stands before it already; see _first_text()."""
        match form:
            case ConstString():
                return self._join(self._lark.text("" if is_begun else form.value), behind)
            case JsonFormat():
                return self._join(self._lark.json(form.json_schema), behind)
            case AnyText():
                return self._free(behind)
            case RegexFormat():
                return self._regex(form.pattern, behind)
            case Sequence():
                return self._sequence(form, behind, is_begun=is_begun)
            case Or():
                return self._any_of(self.write(one, behind) for one in form.elements)
            case Tag():
                return self._tag(form, form.begin if is_begun else "", behind)
            case TriggeredTags():
                return self._triggered(form, behind)
            case TagsWithSeparator():
                return self._separated(form, behind)

    def _sequence(self, form: Sequence, behind: Behind, *, is_begun: bool) -> str:
        parts: list[str] = []
        for index, element in enumerate(form.elements):
            is_end = index + 1 == len(form.elements)
            first = "" if is_end else _first_text(form.elements[index + 1])
            own = behind if is_end else Behind((first,) if first else ())
            parts.append(self.write(element, own, is_begun=is_begun))
            is_begun = bool(first)
        return _together(*parts)

    def _tag(self, tag: Tag, begun: str, behind: Behind) -> str:
        begin = self._lark.text(tag.begin.removeprefix(begun))
        if tag.ends == ("",):
            return _together(begin, self.write(tag.content, behind))
        if not behind.texts:
            return _together(begin, self.write(tag.content, replace(behind, texts=tag.ends)))
        return self._join(_together(begin, self.write(tag.content, Behind(tag.ends))), behind)

    def _triggered(self, form: TriggeredTags, behind: Behind) -> str:
        """Of triggers that begin each other the first named one counts."""
        triggers = list(dict.fromkeys(form.triggers))
        tags = [(_trigger_of(tag, triggers), tag) for tag in form.tags]
        one = self._lark.add(
            self._any_of(
                f"{self._lark.until(trigger)} {rest}"
                for trigger in triggers
                if (rest := self._rest_of(trigger, tags))
            )
        )
        if form.stop_after_first:
            behind_one = self._join(one, behind)
            return behind_one if form.at_least_one else f"({behind_one} | {self._free(behind)})"
        return _together(f"({one}){'+' if form.at_least_one else '*'}", self._free(behind))

    def _rest_of(self, trigger: str, tags: list[tuple[str, Tag]]) -> str:
        own = [self._tag(tag, trigger, Behind()) for start, tag in tags if start == trigger]
        return self._any_of(own) if own else ""

    def _separated(self, form: TagsWithSeparator, behind: Behind) -> str:
        one = self._lark.add(self._any_of(self._tag(tag, "", Behind()) for tag in form.tags))
        if not form.stop_after_first:
            more = _together(self._lark.text(form.separator), one)
            one = f"{one} ({more})*"
        return self._join(one if form.at_least_one else f"({one})?", behind)

    def _free(self, behind: Behind) -> str:
        if behind.texts and all(behind.texts):
            return self._lark.until(*behind.texts)
        if behind.texts or not behind.is_last:
            raise UnwritableSchemaError(
                "free text is followed by a const_string, a tag's begin or end, or by nothing"
            )
        return self._lark.add(ALL_TEXT)

    def _regex(self, pattern: str, behind: Behind) -> str:
        """In one piece with what stands behind it, which it may match, too."""
        return self._lark.terminal(self._join(f"/{_slashed(pattern)}/", behind))

    def _join(self, expression: str, behind: Behind) -> str:
        if not behind.texts:
            return expression
        return _together(expression, self._any_of(map(self._text, behind.texts)))

    def _text(self, text: str) -> str:
        return self._lark.text(text) or '""'

    def _any_of(self, expressions: Iterator[str] | list[str]) -> str:
        return f"({' | '.join(one or _EMPTY for one in expressions)})"


_EMPTY = json.dumps("")


def _together(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _first_text(form: Format) -> str:
    """What surely comes first of it, and has to be left out then."""
    match form:
        case ConstString():
            return form.value
        case Tag():
            return form.begin
        case Sequence():
            return _first_text(form.elements[0])
        case _:
            return ""


def _trigger_of(tag: Tag, triggers: list[str]) -> str:
    for trigger in triggers:
        if trigger and tag.begin.startswith(trigger):
            return trigger
    raise UnwritableSchemaError(f"no trigger begins {tag.begin[:40]!r}")


def _slashed(pattern: str) -> str:
    """As it stands between slashes in Lark."""
    made, is_escaped = [], False
    for char in pattern:
        made.append("\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(made)
