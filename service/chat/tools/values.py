"""Values that models write as text, typed by the schema of the function."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_LITERAL_CHARS = 1 << 16
# Python's parser makes nodes of what is not within strings, half a microsecond or more a character.
_MAX_PYTHON_CHARS = 1 << 12
_STRINGS = re.compile(r"'(?:[^'\\]|\\.?)*+(?:'|\Z)|\"(?:[^\"\\]|\\.?)*+(?:\"|\Z)", re.DOTALL)
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_ANY: frozenset[str] = frozenset()


def argument_json(raw: str, schema: Mapping[str, Any]) -> str:
    """JSON of a value without quotes: what it reads as, unless the schema allows a string and not
    that, or it reads as nothing; then a string."""
    text = json.dumps(raw, ensure_ascii=False)
    allowed = _types_of(schema)
    if allowed == {"string"}:
        return text
    found = _from_literal(raw.strip())
    if found is None or ("string" in allowed and not _is_one_of(found, allowed)):
        return text
    return found


def literal_json(text: str) -> str:
    """JSON of a value as Python or JSON writes it. Raises ValueError."""
    found = _from_literal(text)
    if found is None:
        raise ValueError("neither a literal of Python nor JSON")
    return found


def _types_of(schema: Any) -> frozenset[str]:
    """What the schema says of types by itself or by its alternatives; _ANY where it does not."""
    if not isinstance(schema, Mapping):
        return _ANY
    named = schema.get("type")
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else named
        return frozenset(name for name in names if isinstance(name, str))
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(alternatives, list):
        return _ANY
    found = [_types_of(one) for one in alternatives]
    return _ANY.union(*found) if all(found) else _ANY


def _is_one_of(found: str, allowed: frozenset[str]) -> bool:
    """found: JSON of a value."""
    named = _TYPES.get(found[0], "number")
    is_integer = named == "number" and found.lstrip("-").isdigit()
    return named in allowed or (is_integer and "integer" in allowed)


def _from_literal(text: str) -> str | None:
    """None where it is none, or one that JSON has not."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    for read in (json.loads, _from_python):
        try:
            found = json.dumps(read(text), ensure_ascii=False, allow_nan=False)
            # Half of a surrogate pair is no text.
            found.encode("utf-8")
            return found
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _from_python(text: str) -> Any:
    if len(_STRINGS.sub("", text)) > _MAX_PYTHON_CHARS:
        raise ValueError("too long")
    return ast.literal_eval(text)
