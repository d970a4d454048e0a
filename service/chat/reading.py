"""Reading what characters bring, one by one: generators that are sent each character as it comes.

A text is read the same however it was cut, because nothing here ever sees more than a character.
"""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

from service.chat.json_scan import JsonScanner, NotJsonError

T = TypeVar("T")
Reading = Generator[None, str, T]

SPACE = " \t\n\r"
MAX_HEAD_CHARS = 256
"""Of what stands between marks: names, ids, tags."""


class NotACallError(Exception):
    """The last character does not belong to a call: what was read is text."""


def skip_space(char: str = " ") -> Reading[str]:
    """The first character that is no space. char: the one before."""
    while char in SPACE:
        char = yield
    return char


def expect(text: str, char: str = "") -> Reading[None]:
    """Just this text. char: its first one if it has been read."""
    for wanted in text:
        found = char or (yield)
        char = ""
        if found != wanted:
            raise NotACallError


def read_until(end: str, max_chars: int) -> Reading[str]:
    """What stands before the end mark, which is read too."""
    text = ""
    while not text.endswith(end):
        if len(text) >= max_chars + len(end):
            raise NotACallError
        text += yield
    return text[: -len(end)]


def read_json(char: str, sink: Callable[[str], object]) -> Reading[None]:
    """A JSON value other than a number, from its first character; the sink is given each."""
    scanner = JsonScanner()
    while True:
        try:
            is_end = scanner.feed(char)
        except NotJsonError as error:
            raise NotACallError from error
        sink(char)
        if is_end:
            return
        char = yield


def read_string(char: str) -> Reading[str]:
    """A JSON string of the length of a name."""
    if char != '"':
        raise NotACallError
    chars: list[str] = []

    def take(char: str) -> None:
        if len(chars) > MAX_HEAD_CHARS:
            raise NotACallError
        chars.append(char)

    yield from read_json(char, take)
    text: str = json.loads("".join(chars))
    return text
