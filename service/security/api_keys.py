"""ApiKey: a key, the name that logs may show, and what it may; and the file that holds them.

One key a line, followed, where a key has limits or a name of its own, by NAME=VALUE fields:

    0f3c9e...  name=team-a requests_per_minute=60 tokens_per_minute=100000 min_priority=-10
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import ValidationError

from service.security.priorities import PriorityRange
from service.security.quota import KeyLimits
from workers.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_PURPOSE = b"tessera api key name"
_NAME_DIGITS = 12


@dataclass(frozen=True, slots=True)
class ApiKey:
    """name is shown where the key must not be, and is that key's in every process and for good:
    quotas and sessions go by it."""

    key: str = field(repr=False)
    name: str
    limits: KeyLimits = KeyLimits()
    priorities: PriorityRange = PriorityRange()


def digest_api_key(key: str) -> bytes:
    """SHA-256: what is kept and compared instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_key_file(text: str, limits: KeyLimits, priorities: PriorityRange) -> list[ApiKey]:
    """The keys of a file; empty lines and lines that start with # do not count.

    limits, priorities: what a line does not set. Raises ConfigError, which never shows a key.
    """
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    return [
        _parse(fields, number, limits, priorities)
        for number, fields in lines
        if fields and not fields[0].startswith("#")
    ]


def check_distinct(keys: Iterable[ApiKey]) -> None:
    """Raise ConfigError if two keys have one name, or one key may one thing and another."""
    rights: dict[str, tuple[KeyLimits, PriorityRange]] = {}
    named: dict[str, str] = {}
    for key in keys:
        if named.setdefault(key.name, key.key) != key.key:
            raise ConfigError(f"auth: two API keys are called {key.name}")
        given = (key.limits, key.priorities)
        if rights.setdefault(key.key, given) != given:
            raise ConfigError(f"auth: {key.name} is there before, with other limits")


def _name_of(key: str) -> str:
    """Of a key without one: the same wherever it stands in whichever file, and one way only."""
    name = hmac.new(digest_api_key(key), _NAME_PURPOSE, hashlib.sha256).hexdigest()
    return f"key-{name[:_NAME_DIGITS]}"


def _parse(fields: list[str], number: int, limits: KeyLimits, priorities: PriorityRange) -> ApiKey:
    key, *options = fields
    given: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or name in given:
            raise ConfigError(f"line {number}: after the key come NAME=VALUE fields, each once")
        given[name] = value
    name = given.pop("name", _name_of(key))
    if not _NAME.fullmatch(name):
        raise ConfigError(f"line {number}: a name is 1 to 64 letters, digits, dots, _ or -")
    own = {field: given.pop(field) for field in PriorityRange.model_fields if field in given}
    try:
        limits = KeyLimits.model_validate({**limits.model_dump(), **given})
    except ValidationError as error:
        names = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise ConfigError(f"line {number}: no such limit, or no positive number: {names}") from None
    try:
        priorities = PriorityRange.model_validate({**priorities.model_dump(), **own})
    except ValidationError:
        message = "priorities are 32-bit integers, min_priority at most 0, max_priority at least 0"
        raise ConfigError(f"line {number}: {message}") from None
    return ApiKey(key, name, limits, priorities)
