"""gpt-oss's Harmony: an answer is messages on channels. What was thought stands on analysis, what
is said on final, or on commentary where it is to nobody; a message to a function is a call, which
is left as it is written for who reads calls.
"""

import re

from service.chat.parsed import ParsedText
from service.chat.tools.harmony import (
    CALL,
    CALL_HEAD,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RECIPIENT,
    RETURN,
    START,
)
from service.tokenizer.stop_strings import ROOT, StopStrings

MAX_HEADER_CHARS = 512
_BEGINNINGS = (CHANNEL, START, " to=", "to=", MESSAGE)
_TO = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")


class HarmonyReader:
    """A parser of thinking; see service.chat.reasoning. is_open: the prompt ends within analysis.

    A text that does not begin as a message does is content from its first character on.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._marks = StopStrings((END, CALL, RETURN, START, CHANNEL))
        self._state = ROOT
        self._held = ""
        self._is_header = not is_open
        self._is_first = True
        self._is_thought = is_open
        self._is_call = False
        self._is_plain = False

    def push(self, text: str) -> ParsedText:
        parsed = ParsedText()
        for position, char in enumerate(text):
            if self._is_plain:
                parsed.content += text[position:]
                break
            if self._is_header:
                self._head(char, parsed)
            else:
                self._body(char, parsed)
        return parsed

    def flush(self) -> ParsedText:
        parsed, held = ParsedText(), self._held
        self._held = ""
        if not self._is_header:
            self._give(held, parsed)
        elif self._is_first:
            parsed.content = held
        return parsed

    def _head(self, char: str, parsed: ParsedText) -> None:
        self._held += char
        held = self._held
        if held.endswith(MESSAGE):
            self._begin(held.removesuffix(MESSAGE), parsed)
            return
        begins = any(held.startswith(begin) or begin.startswith(held) for begin in _BEGINNINGS)
        if (self._is_first and not begins) or len(held) > MAX_HEADER_CHARS:
            parsed.content += held
            self._held = ""
            self._is_plain = True

    def _begin(self, header: str, parsed: ParsedText) -> None:
        """The header of a message is whole."""
        channel, to = _CHANNEL_NAME.search(header), _TO.search(header)
        recipient = "" if to is None else to.group(1)
        self._held, self._state = "", ROOT
        self._is_header = self._is_first = False
        self._is_call = recipient.startswith(RECIPIENT)
        self._is_thought = (
            not self._is_call and channel is not None and channel.group(1) == "analysis"
        )
        if self._is_call:
            name = recipient.removeprefix(RECIPIENT)
            parsed.content += f"{CALL_HEAD}{name} {CONSTRAIN}json{MESSAGE}"

    def _body(self, char: str, parsed: ParsedText) -> None:
        self._held += char
        self._state = self._marks.step(self._state, char)
        mark = self._marks.match(self._state)
        if mark is None:
            depth = self._marks.depth(self._state)
            self._give(self._held[: len(self._held) - depth], parsed)
            self._held = self._held[len(self._held) - depth :]
            return
        if self._is_call:
            parsed.content += CALL
        # What begins a header is part of it.
        self._held = mark if mark in (START, CHANNEL) else ""
        self._state, self._is_header = ROOT, True

    def _give(self, text: str, parsed: ParsedText) -> None:
        if self._is_thought:
            parsed.reasoning += text
        else:
            parsed.content += text
