"""What a model thinks before it answers: text between two marks, at the beginning."""

from dataclasses import dataclass
from typing import Protocol

from service.chat.harmony import HarmonyReader
from service.chat.parsed import ParsedText
from service.chat.reading import SPACE
from service.tokenizer.stop_strings import ROOT, StopStrings

MAX_HELD_SPACE_CHARS = 256


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The marks around thinking. The model writes the first one, or its template did.

    between: what the model writes behind its thinking before anything else. answer_head: and then
    before an answer. Where it has such heads, thinking may come first wherever a grammar holds.
    sign: what a template has in it where models think like that. marks: tokens that all of these
    are made of, besides begin and end.
    """

    name: str
    begin: str
    end: str
    between: str = ""
    answer_head: str = ""
    sign: str = ""
    marks: tuple[str, ...] = ()

    def parser(self, *, is_open: bool) -> "ThoughtReader":
        """Of one choice."""
        return ReasoningParser(self, is_open=is_open)


class HarmonyStyle(ReasoningStyle):
    """Thinking is a message among others."""

    def parser(self, *, is_open: bool) -> "ThoughtReader":
        return HarmonyReader(is_open=is_open)


class ThoughtReader(Protocol):
    """push() text in order, flush() at its end: reasoning, and content for other parsers."""

    def push(self, text: str) -> ParsedText: ...

    def flush(self) -> ParsedText: ...


STYLES = {
    style.name: style
    for style in (
        ReasoningStyle("think", "<think>", "</think>"),
        ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
        HarmonyStyle(
            "harmony",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            between="<|start|>assistant",
            answer_head="<|channel|>final<|message|>",
            sign="<|channel|>",
            marks=("<|start|>", "<|channel|>", "<|message|>"),
        ),
        ReasoningStyle("granite", "Here is my thought process:", "Here is my response:"),
    )
}


def reasoning_style_of(template: str) -> ReasoningStyle | None:
    """By the signs or end marks that a model's chat template looks for or writes."""
    return next((style for style in STYLES.values() if (style.sign or style.end) in template), None)


class ReasoningParser:
    """Of one choice. Its content is what follows the thinking; spaces around both are dropped.

    is_open: the prompt ends within the thinking. Without an end mark all of it is thinking.
    """

    def __init__(self, style: ReasoningStyle, *, is_open: bool) -> None:
        self._begin = style.begin
        self._end = StopStrings((style.end,))
        self._state = ROOT
        self._held = ""
        self._is_held_blank = True
        self._has_begun = is_open
        self._has_ended = False
        self._is_blank = True
        self._is_behind = False

    def push(self, text: str) -> ParsedText:
        """reasoning, and content that other parsers go on with."""
        parsed = ParsedText()
        for position, char in enumerate(text):
            if self._has_ended:
                parsed.content += self._follow(text[position:])
                break
            if self._has_begun:
                self._think(char, parsed)
            else:
                self._expect_begin(char, parsed)
        return parsed

    def flush(self) -> ParsedText:
        held, self._held = self._held, ""
        if self._has_begun and not self._has_ended:
            return ParsedText(reasoning=held.rstrip(SPACE))
        return ParsedText(content=held)

    def _expect_begin(self, char: str, parsed: ParsedText) -> None:
        self._held += char
        seen = self._held.lstrip(SPACE)
        if seen == self._begin:
            self._held = ""
            self._has_begun = True
        elif not self._begin.startswith(seen) or len(self._held) > MAX_HELD_SPACE_CHARS:
            parsed.content += self._held
            self._held = ""
            self._has_ended = True

    def _think(self, char: str, parsed: ParsedText) -> None:
        if self._is_blank and char in SPACE:
            return
        self._is_blank = False
        self._held += char
        self._state = self._end.step(self._state, char)
        if self._end.match(self._state) is not None:
            parsed.reasoning += self._held[: -self._end.depth(self._state)].rstrip(SPACE)
            self._held = ""
            self._has_ended = self._is_behind = True
            return
        may_hold_more = len(self._held) <= MAX_HELD_SPACE_CHARS
        if self._is_held_blank and char in SPACE and may_hold_more:
            return
        depth = self._end.depth(self._state)
        self._is_held_blank = not depth
        sure = self._held[: len(self._held) - depth]
        if may_hold_more:
            sure = sure.rstrip(SPACE)
        parsed.reasoning += sure
        self._held = self._held[len(sure) :]

    def _follow(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip(SPACE)
            self._is_behind = not text
        return text
