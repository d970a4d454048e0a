"""Keeps a client's text from becoming control tokens when a chat template surrounds it.

Before rendering, every character of client text that could begin a special token is moved to a
private-use code point that the text does not use; one character becomes one character, so trimming,
splitting and slicing in the template work as before. In the rendered text only the template's own
special tokens can still be read; after restoring the characters, any further special token that
the tokenizer finds was made of client text. Knows no Jinja.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_PRIVATE_USE = re.compile("[\U00100000-\U0010fffd]")
_PRIVATE_USE_RANGE = range(0x100000, 0x10FFFE)


class UnguardableTextError(Exception):
    """Client text uses up every private-use character there is."""


class SpecialTokenGuard:
    """The special tokens of one tokenizer, and the strings its chat template looks for.

    A literal of the template, such as a reasoning tag, stays readable in client text unless it
    could be the beginning of a special token.
    """

    def __init__(self, special_tokens: Iterable[str], literals: Iterable[str]) -> None:
        tokens = sorted({token for token in special_tokens if token}, key=len, reverse=True)
        self._first_chars = sorted({token[0] for token in tokens})
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        kept = sorted(
            (literal for literal in literals if self._is_harmless(literal, tokens)),
            key=len,
            reverse=True,
        )
        alternatives = [*map(re.escape, kept), *map(re.escape, self._first_chars)]
        self._guarded = re.compile("|".join(alternatives) or "(?!)")

    def _is_harmless(self, literal: str, tokens: list[str]) -> bool:
        starts = [i for i, char in enumerate(literal) if char in self._first_chars]
        return bool(starts) and not any(
            token.startswith(literal[i:]) or literal.startswith(token, i)
            for i in starts
            for token in tokens
        )

    def shield(self, texts: Iterable[str]) -> "Shield":
        """A Shield whose private characters occur in none of the texts."""
        used = {char for text in texts for char in _PRIVATE_USE.findall(text)}
        free = (chr(point) for point in _PRIVATE_USE_RANGE if chr(point) not in used)
        chars = [*self._first_chars, ""]
        private = [char for _, char in zip(chars, free, strict=False)]
        if len(private) < len(chars):
            raise UnguardableTextError
        return Shield(dict(zip(self._first_chars, private, strict=False)), self._guarded, private)

    def find(self, text: str) -> list[tuple[int, str]]:
        """Start and text of every special token that stands in `text`, in order."""
        return [(match.start(), match.group()) for match in self._tokens.finditer(text)]


class Shield:
    """One request's substitution. marker: a private character that no text holds."""

    def __init__(
        self, to_private: dict[str, str], guarded: re.Pattern[str], private: list[str]
    ) -> None:
        self._to_private = to_private
        self._guarded = guarded
        self._restore = {ord(private): char for char, private in to_private.items()}
        self.marker = private[-1]

    def protect(self, value: Any) -> Any:
        """The same JSON value with all its strings, keys included, made harmless."""
        if isinstance(value, str):
            return self._guarded.sub(self._substitute, value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        return text.translate(self._restore)

    def _substitute(self, match: re.Match[str]) -> str:
        text = match.group()
        return self._to_private.get(text, text)
