"""Writes `definitions.config` of the chart's values.schema.json from service/config.py.

    python -m helm.config_schema

So the chart takes exactly the settings that the service takes, less what the chart decides itself
and less secrets. A test compares the two. Knows no other part of the schema.
"""

import json
from pathlib import Path
from typing import Any

from service.config import ServeConfig

SCHEMA_FILE = Path(__file__).parent / "tessera" / "values.schema.json"

# Decided by templates/_serve.tpl from values of their own, or secret.
OWNED_BY_CHART = frozenset(
    {
        "app_name",
        "models",
        "num_replicas",
        "autoscaling",
        "num_ingresses",
        "drain_timeout_s",
        "http.host",
        "http.port",
        "http.proxy",
        "http.keep_alive_timeout_s",
        "http.tls",
        "grpc.host",
        "grpc.port",
        "grpc.tls",
        "metrics.host",
        "metrics.port",
        "channel.transport",
        "engine.model",
        "engine.tp_size",
        "engine.device",
        "engine.weights_cache_dir",
        "engine.weights_cache_bytes",
        "replica.cpus_per_rank",
        "replica.gpus_per_rank",
        "auth.api_key_file",
        "auth.api_keys",
        "auth.admin_api_key_file",
        "auth.admin_api_keys",
    }
)
_KEPT = ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
         "minLength", "maxLength", "pattern", "minItems", "maxItems")  # fmt: skip


def config_schema() -> dict[str, Any]:
    """The settings a chart's user may give, as draft 7 without references; nothing is required."""
    whole = ServeConfig.model_json_schema()
    return _object(whole, whole.get("$defs", {}), "")


def _object(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    properties = {
        name: _reduced(field, definitions, f"{prefix}{name}.")
        for name, field in schema["properties"].items()
        if f"{prefix}{name}" not in OWNED_BY_CHART
    }
    used = {name: field for name, field in properties.items() if field.get("properties") != {}}
    return {"type": "object", "additionalProperties": False, "properties": used}


def _reduced(field: dict[str, Any], definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    if "$ref" in field:
        field = definitions[field["$ref"].rpartition("/")[2]]
    if "properties" in field:
        return _object(field, definitions, prefix)
    reduced = {key: field[key] for key in _KEPT if key in field}
    if "anyOf" in field:
        reduced["anyOf"] = [_reduced(option, definitions, prefix) for option in field["anyOf"]]
    if "items" in field:
        reduced["items"] = _reduced(field["items"], definitions, prefix)
    if "patternProperties" in field:
        reduced["additionalProperties"] = False
        reduced["patternProperties"] = {
            pattern: _reduced(value, definitions, prefix)
            for pattern, value in field["patternProperties"].items()
        }
    if isinstance(field.get("additionalProperties"), dict):
        reduced["additionalProperties"] = _reduced(
            field["additionalProperties"], definitions, prefix
        )
    return reduced


def write() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    schema["definitions"]["config"] = config_schema()
    SCHEMA_FILE.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    write()
