"""Values that models write as text, typed by the schema of the function."""

import ast
import json
from collections.abc import Mapping
from typing import Any

MAX_LITERAL_CHARS = 1 << 16


def argument_json(raw: str, schema: Mapping[str, Any]) -> str:
    """JSON of a value without quotes: a string where the schema allows only that, else what it
    reads as, else a string again."""
    if schema.get("type") == "string":
        return json.dumps(raw, ensure_ascii=False)
    return _from_literal(raw.strip()) or json.dumps(raw, ensure_ascii=False)


def literal_json(text: str) -> str:
    """JSON of a value as Python or JSON writes it. Raises ValueError."""
    found = _from_literal(text)
    if found is None:
        raise ValueError("neither a literal of Python nor JSON")
    return found


def _from_literal(text: str) -> str | None:
    """None where it is none, or one that JSON has not."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = json.dumps(read(text), ensure_ascii=False, allow_nan=False)
            # Half of a surrogate pair is no text.
            found.encode("utf-8")
            return found
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None
