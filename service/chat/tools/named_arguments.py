"""Grammars for arguments that are written one by one, each with its name."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.chat.tools.grammar import LarkRules, UnwritableSchemaError

MAX_PROPERTIES = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ValueRule = Callable[[str, Mapping[str, Any], LarkRules], str]
_KNOWN = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$defs"}
    | {"definitions", "$schema", "$id", "$comment", "examples", "default", "strict", "x-guidance"}
)
_TEXT_ONLY = frozenset(
    {"type", "description", "title", "default", "examples", "enum", "const", "$defs", "definitions"}
)


def named_arguments(
    schema: Mapping[str, Any], lark: LarkRules, *, separator: str, value: ValueRule
) -> str:
    """Those that are required, in the schema's order, then the others, each at most once.

    value: makes the rule of one. Raises UnwritableSchemaError.
    """
    unknown = sorted(schema.keys() - _KNOWN)
    if unknown:
        raise UnwritableSchemaError(f"{unknown[0]} at the top of a schema cannot be followed")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnwritableSchemaError("properties is an object, required a list")
    if not all(isinstance(name, str) and name in properties for name in required):
        raise UnwritableSchemaError("what is required has to be among the properties")
    if len(properties) > MAX_PROPERTIES or not all(map(_NAME.fullmatch, properties)):
        raise UnwritableSchemaError(
            f"at most {MAX_PROPERTIES} properties, named by letters, digits, '_', '-' and '.'"
        )
    rules = {
        name: value(name, {**one, **shared} if isinstance(one, dict) else shared, lark)
        for name, one in properties.items()
    }
    needed = [rules[name] for name in properties if name in required]
    free = [rules[name] for name in properties if name not in required]
    return _sequence(needed, free, lark.text(separator), lark)


def _sequence(needed: Sequence[str], free: Sequence[str], separator: str, lark: LarkRules) -> str:
    tails = [f"({separator} {rule})?" for rule in free]
    if needed:
        return " ".join([f" {separator} ".join(needed), *tails])
    if not free:
        return ""
    firsts = (" ".join([rule, *tails[i + 1 :]]) for i, rule in enumerate(free))
    return f"({lark.add(' | '.join(firsts))})?"


def raw_value(schema: Mapping[str, Any], end: str, lark: LarkRules) -> str:
    """A string as it is, anything else as JSON, up to an end mark. Raises UnwritableSchemaError."""
    if schema.get("type") != "string":
        return f"{lark.json(schema)} {lark.text(end)}"
    unknown = sorted(schema.keys() - _TEXT_ONLY)
    if unknown:
        raise UnwritableSchemaError(f"{unknown[0]} of a string cannot be followed")
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if texts is not None:
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UnwritableSchemaError("the enum of a string is a list of strings")
        choices = lark.add(" | ".join(lark.text(text) or '""' for text in texts))
        return f"{choices} {lark.text(end)}"
    return lark.until(end)
