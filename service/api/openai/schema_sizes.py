"""How large a JSON schema is, before anything is done with it that its size makes long."""

import json
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from service.api.json_shape import measure
from service.limits import MAX_GRAMMAR_BYTES, MAX_OTHER_ITEMS

# Of a number or of punctuation, roughly.
_VALUE_BYTES = 8
_MAX_NODES = 1 << 15


def schema_bytes(schema: dict[str, Any]) -> int:
    """Roughly, and not beyond the most that any schema may have. Writing it holds the interpreter
    lock from beginning to end; looking at it does not."""
    size, unseen = 0, [schema]
    while unseen:
        item: Any = unseen.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += sum(map(len, item)) + _VALUE_BYTES * len(item)
            unseen.extend(item.values())
        elif isinstance(item, list):
            size += _VALUE_BYTES * len(item)
            unseen.extend(item)
        if size > MAX_GRAMMAR_BYTES:
            break
    return size


def parsed_schema(text: str) -> Any:
    """What a JSON text says. Raises ValueError for no JSON, and for more than may be parsed in one
    go: a body that has the text in it was judged by its own shape, in which this is one string."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a schema may have at most {MAX_GRAMMAR_BYTES} bytes")
    shape = measure(text.encode("utf-8", "surrogatepass"))
    if shape.num_items > MAX_OTHER_ITEMS or shape.num_nodes > _MAX_NODES:
        raise ValueError(
            f"a JSON text may have at most {MAX_OTHER_ITEMS} values in lists, and {_MAX_NODES} "
            "lists, objects and named fields"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from error


def json_object(value: Any) -> dict[str, Any]:
    """An object, or what a JSON text of one says. Raises ValueError where it is none, or too
    large."""
    document = parsed_schema(value) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise ValueError("must be an object, or the JSON text of one")
    if schema_bytes(document) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a schema may have at most {MAX_GRAMMAR_BYTES} bytes")
    return document


JsonObject = Annotated[
    dict[str, Any],
    PlainValidator(json_object),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
