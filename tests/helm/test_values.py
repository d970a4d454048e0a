"""What needs no Go: the schema against the values, the service's settings and the documentation."""

import copy
import json
import re

import pytest
import yaml
from jsonschema import Draft7Validator

from helm.config_schema import OWNED_BY_CHART, SCHEMA_FILE, config_schema
from service.config import ServeConfig
from tests.helm.rendering import CHART, CI_VALUES

SCHEMA = json.loads(SCHEMA_FILE.read_text())
VALIDATOR = Draft7Validator(SCHEMA)
VALUES_TEXT = (CHART / "values.yaml").read_text()
DEFAULTS = yaml.safe_load(VALUES_TEXT)
README = (CHART / "README.md").read_text()

BAD_VALUES = {
    "a misspelt key": ("engineGroup", []),
    "no engine group": ("engineGroups", []),
    "a group without a name": ("engineGroups", [{"replicas": 2}]),
    "a name that Kubernetes refuses": ("engineGroups", [{"name": "Llama_8B"}]),
    "a name too long for pods": ("engineGroups", [{"name": "a" * 21}]),
    "an unknown key in a group": ("engineGroups", [{"name": "a", "gpus": 1}]),
    "a name for all groups": ("engineGroupDefaults", {"name": "a"}),
    "TP of three": ("engineGroups", [{"name": "a", "tpSize": 3}]),
    "half a GPU": ("engineGroups", [{"name": "a", "gpusPerRank": 0.5}]),
    "no replica": ("engineGroups", [{"name": "a", "replicas": 0}]),
    "a relative model path": ("engineGroups", [{"name": "a", "model": {"path": "models/a"}}]),
    "a repository that is a URL": (
        "engineGroups",
        [{"name": "a", "model": {"huggingFace": {"repository": "https://hf.co/a/b"}}}],
    ),
    "a flag as revision": (
        "engineGroups",
        [{"name": "a", "model": {"huggingFace": {"repository": "a/b", "revision": "--help"}}}],
    ),
    "a setting through the environment": (
        "engineGroups",
        [{"name": "a", "extraEnv": [{"name": "TESSERA_HTTP__PORT", "value": "1"}]}],
    ),
    "a memory size in words": (
        "engineGroups",
        [{"name": "a", "resources": {"limits": {"memory": "lots"}}}],
    ),
    "an unknown setting": ("config", {"limits": {"max_nn": 1}}),
    "a setting out of range": ("config", {"limits": {"max_n": 0}}),
    "a setting of the wrong type": ("config", {"engine": {"seed": "zero"}}),
    "an address that the chart owns": ("config", {"http": {"host": "127.0.0.1"}}),
    "a size that the chart owns": ("config", {"engine": {"tp_size": 2}}),
    "API keys in values": ("config", {"auth": {"api_keys": ["secret"]}}),
    "an unknown proxy": ("http", {"proxy": "nginx"}),
    "a port out of range": ("http", {"port": 70000}),
    "an unknown authentication": ("ray", {"authMode": "none"}),
    "another Ray": ("rayVersion", "2.52.0"),
    "an unknown upgrade": ("upgradeStrategy", "RollingUpdate"),
    "an unknown kind of volume": ("weights", {"type": "nfs"}),
    "an unknown access mode": ("weights", {"persistentVolumeClaim": {"accessModes": ["Any"]}}),
    "root": ("podSecurityContext", {"runAsUser": 0}),
    "permission to be root": ("podSecurityContext", {"runAsNonRoot": False}),
    "an ingress without a host": ("ingress", {"hosts": [{"group": "a"}]}),
    "a protocol of no listener": ("gateway", {"routes": [{"group": "a", "protocol": "tcp"}]}),
    "a gateway without a name": ("gateway", {"parentRefs": [{"namespace": "a"}]}),
    "a peer that is nobody": ("networkPolicy", {"clientsFrom": [{}]}),
    "everybody as operator": ("networkPolicy", {"operatorFrom": []}),
    "an unknown monitor": ("monitoring", {"kind": "Probe"}),
    "an interval without a unit": ("monitoring", {"interval": "15"}),
    "no time to drain": ("drainTimeoutSeconds", 0),
    "an object without a kind": ("extraObjects", [{"apiVersion": "v1"}]),
}


def overlaid(defaults, given):
    """Helm's merge: maps merge, everything else replaces."""
    merged = copy.deepcopy(defaults)
    for key, value in given.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = overlaid(merged[key], value) if both else value
    return merged


def problems(values):
    return [error.message for error in VALIDATOR.iter_errors(values)]


def subschemas(schema):
    yield schema
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, dict | list):
            yield from subschemas(value)


def test_the_schema_is_draft_7():
    Draft7Validator.check_schema(SCHEMA)


def test_every_object_of_the_schema_names_its_keys():
    """An open object takes any key, so a misspelt one would be lost without a word."""
    opaque = {"nodeAffinity", "podAffinity", "podAntiAffinity", "secretKeyRef", "configMapKeyRef"}
    opaque |= {"fieldRef", "resourceFieldRef"}
    for schema in subschemas(SCHEMA):
        if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
            assert schema.get("additionalProperties") is False
            for name, field in schema["properties"].items():
                is_open = field.get("type") == "object" and set(field) == {"type"}
                assert not is_open or name in opaque, name


def test_the_defaults_are_valid():
    assert problems(DEFAULTS) == []


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_the_example_values_are_valid(path):
    assert problems(overlaid(DEFAULTS, yaml.safe_load(path.read_text()))) == []


@pytest.mark.parametrize("case", BAD_VALUES, ids=str)
def test_the_schema_refuses(case):
    key, value = BAD_VALUES[case]
    assert problems(overlaid(DEFAULTS, {key: value}))


def test_the_chart_takes_the_settings_of_the_service():
    expected = config_schema()
    assert SCHEMA["definitions"]["config"] == expected, "run: python -m helm.config_schema"


def test_what_the_chart_owns_are_settings():
    """A setting that was renamed must not go on being refused, or allowed, under its old name."""
    for name in OWNED_BY_CHART:
        fields, model = ServeConfig.model_fields, None
        for part in name.split("."):
            assert part in fields, name
            model = fields[part].annotation
            fields = getattr(model, "model_fields", {})


def test_the_schema_knows_exactly_the_keys_of_the_values():
    def keys(schema, prefix=""):
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "allOf" in schema:
            schema = {**schema, **schema["allOf"][0]}
            return keys(schema["allOf"][0], prefix) if "$ref" in schema["allOf"][0] else set()
        found = set()
        for name, field in schema.get("properties", {}).items():
            found |= {prefix + name} | keys(field, f"{prefix}{name}.")
        return found

    def present(values, prefix=""):
        found = set()
        for name, value in values.items():
            found |= {prefix + name}
            if isinstance(value, dict):
                found |= present(value, f"{prefix}{name}.")
        return found

    free = re.compile(
        r"(^|\.)(config|resources|affinity|labels|annotations|nodeSelector|matchLabels)\."
    )
    open_ended = {"global", "engineGroupDefaults.name"}
    optional = {"podSecurityContext.supplementalGroups"}
    optional |= {"podSecurityContext.seccompProfile.localhostProfile"}
    known = {key for key in keys(SCHEMA) if not free.search(key)} - open_ended - optional
    given = {key for key in present(DEFAULTS) if not free.search(key)}
    assert known == given


def test_every_value_at_the_top_is_explained():
    lines = VALUES_TEXT.splitlines()
    for name in DEFAULTS:
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{name}:"))
        # A comment above it, above its neighbours of one block, or inside it.
        above = next(i for i in range(index, -1, -1) if not lines[i].strip() or i == 0)
        block = lines[above : index + 4]
        assert any(line.strip().startswith("#") for line in block), name
        assert f"`{name}`" in README, f"{name} is not in the chart's README"


def values_at(path):
    """What the values, or those of an engine group, hold at a dotted path; None if nothing."""
    for found in (DEFAULTS, DEFAULTS["engineGroupDefaults"]):
        for part in path.split("."):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        if found != {} or path.rpartition(".")[2] in ENDS_IN_MAPS:
            return found
    return None


def is_setting(path):
    fields = ServeConfig.model_fields
    for part in path.split("."):
        if part not in fields:
            return False
        fields = getattr(fields[part].annotation, "model_fields", {})
    return True


ENDS_IN_MAPS = {"config"}
COMMENTS = [line.strip().lstrip("# ") for line in VALUES_TEXT.splitlines() if "#" in line]
PROSE = [line for line in COMMENTS if not re.match(r"(- )?[\w./-]+: ", line)]


def test_every_key_that_a_comment_names_exists():
    """Files, hosts and the images' labels apart, a word with a dot is a key or a setting."""
    words = {
        word
        for line in PROSE
        for word in re.findall(r"(?<![\w./-])[a-z][A-Za-z]*(?:\.[a-z][A-Za-z_]*)+(?![\w/-])", line)
    }
    files = {word for word in words if re.search(r"\.(py|json|yaml|md|io|com)$", word)}
    assert len(words - files) > 5
    unknown = {word for word in words - files if values_at(word) is None and not is_setting(word)}
    assert unknown == set()


def test_a_key_that_does_not_exist_is_found():
    assert values_at("grpc.enabled") is None
    assert not is_setting("grpc.enabled")
    assert values_at("autoscaler.enabled") is False
    assert is_setting("engine.max_running_requests")


def test_every_template_is_in_the_readme():
    for path in (CHART / "templates").rglob("*.*"):
        assert f"`{path.relative_to(CHART / 'templates')}`" in README, path.name


def test_no_example_holds_a_secret():
    for path in [CHART / "values.yaml", *CI_VALUES]:
        assert not re.search(r"hf_[A-Za-z0-9]{8}|sk-[A-Za-z0-9]{8}|BEGIN .*KEY", path.read_text())
