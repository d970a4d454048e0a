"""docs/operations.md and deploy/README.md: the values, files and links that they name exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DEPLOY = (ROOT / "deploy" / "README.md").read_text()
VALUES = yaml.safe_load((ROOT / "helm" / "tessera" / "values.yaml").read_text())


def code_of(text):
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("text", [OPERATIONS, DEPLOY], ids=["operations", "deploy"])
def test_files_that_are_named_exist(text):
    paths = [code for code in code_of(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", code)]
    known = {"docs", "helm", "deploy", "tests", "service", "workers"}
    paths += re.findall(r"docs/[\w/-]+\.md", text)
    for path in paths:
        if path.split("/")[0] in known:
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "path",
    [
        "http.proxy",
        "monitoring.kind",
        "weights.type",
        "weights.nodeCache",
        "kernelCache.type",
        "networkPolicy.clientsFrom",
        "networkPolicy.operatorFrom",
        "ray.existingSecret",
        "ray.faultTolerance.redisAddress",
        "podDisruptionBudget.protectHead",
        "autoscaler.enabled",
        "upgradeStrategy",
        "drainTimeoutSeconds",
        "terminationGracePeriodSeconds",
    ],
)
def test_values_that_operations_names_are_values(path):
    assert path in OPERATIONS
    values = VALUES
    for part in path.split("."):
        values = values[part]


def test_labels_that_operations_selects_by_are_the_templates_own():
    templates = "".join(path.read_text() for path in (ROOT / "helm/tessera/templates").glob("_*"))
    for label in set(re.findall(r"tessera\.dev/\w+", OPERATIONS)):
        assert f"{label}:" in templates


def test_what_was_not_run_is_said_first():
    assert OPERATIONS.index("What has not been run") < OPERATIONS.index("## ")
    assert "no real Kubernetes" in OPERATIONS
