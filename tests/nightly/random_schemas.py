"""JSON schemas to constrain outputs with: generated ones, or those of a folder.

A folder holds schemas, a JSON file each, or files of the JSON Schema test suite, a list of groups
with a schema each (github.com/json-schema-org/JSON-Schema-Test-Suite, MIT; the sdist of PyPI's
jsonschema has it in json/tests). A schema of the suite that does not say so is of the draft that
its folder is named after.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
_WORDS = ("name", "street", "size", "total", "is_open", "\u00fcber", "x-y", "tags", "owner", "when")
_MAX_DEPTH = 3
_DRAFTS = {f"draft{n}": f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 6, 7)}


def generated(seed: int) -> Schema:
    """Finite: strings, numbers and lists are bounded, so that a few hundred tokens suffice."""
    return _object(random.Random(seed), 0)


def of_folder(folder: Path) -> Iterator[Schema]:
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        groups = document if isinstance(document, list) else [{"schema": document}]
        for group in groups:
            schema = group.get("schema") if isinstance(group, dict) else None
            if isinstance(schema, dict):
                draft = _DRAFTS.get(path.parent.name)
                yield schema if draft is None else {"$schema": draft, **schema}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _choice, lambda rng: {"type": rng.choice(["boolean", "null"])}]
    if depth < _MAX_DEPTH:
        makers += [lambda rng: _object(rng, depth), lambda rng: _list(rng, depth)]
        makers.append(lambda rng: {"anyOf": [_any(rng, depth + 1), _any(rng, depth + 1)]})
    return rng.choice(makers)(rng)


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)},
            {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z]-[0-9]{1,3}$"])},
            {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        ]
    )


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}


def _choice(rng: random.Random) -> Schema:
    values = ["red", "not yet", 3, -1.5, True, None, {"a": 1}, [1, 2]]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _list(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _any(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
