"""Compose, Prometheus and Grafana files: shape, addresses, what they mount, what they pin."""

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from service.config import ServeConfig, load_config

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
GPU = yaml.safe_load((DEPLOY / "docker-compose.gpu.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
DATASOURCES = yaml.safe_load(
    (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
)
BOARDS = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/tessera.yaml").read_text())

TEXTS = {"type": "array", "items": {"type": "string"}}
# What these files use of the Compose specification, so that a misspelt key is found without Docker.
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "context": {"type": "string"},
                "args": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        "command": TEXTS,
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "ports": TEXTS,
        "volumes": TEXTS,
        "tmpfs": TEXTS,
        "depends_on": TEXTS,
        "cap_drop": TEXTS,
        "security_opt": TEXTS,
        "read_only": {"type": "boolean"},
        "shm_size": {"type": "string"},
        "stop_grace_period": {"type": "string", "pattern": "^[0-9]+s$"},
        "restart": {"enum": ["unless-stopped"]},
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test"],
            "properties": {
                "test": TEXTS,
                "interval": {"type": "string"},
                "timeout": {"type": "string"},
                "start_period": {"type": "string"},
                "start_interval": {"type": "string"},
                "retries": {"type": "integer"},
            },
        },
        "deploy": {"type": "object"},
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": {"type": "string"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object"},
    },
}


@pytest.mark.parametrize("document", [COMPOSE, GPU], ids=["compose", "gpu"])
def test_compose_files_have_only_known_keys(document):
    assert not list(Draft202012Validator(SCHEMA).iter_errors(document))


def test_nothing_is_published_beyond_loopback():
    for name, service in COMPOSE["services"].items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name


def test_every_service_drops_what_it_does_not_need():
    for service in COMPOSE["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]


def test_images_are_pinned():
    for service in COMPOSE["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


def test_mounted_files_and_volumes_exist():
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source


def test_the_service_takes_its_flags():
    """The same names that `tessera serve` knows, and settings that exist."""
    flags = [part for part in COMPOSE["services"]["tessera"]["command"] if part.startswith("--")]
    settings = dict(
        part.removeprefix("--set=").split("=", 1) for part in flags if part.startswith("--set=")
    )
    assert load_config(None, {}, settings).metrics.host == "0.0.0.0"
    assert [part for part in flags if not part.startswith("--set=")] == ["--host=0.0.0.0"]


def test_a_stop_waits_for_the_drain():
    grace_s = int(COMPOSE["services"]["tessera"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > ServeConfig().drain_timeout_s


def test_the_health_check_asks_the_ready_route():
    probe = COMPOSE["services"]["tessera"]["healthcheck"]["test"][-1]
    assert f":{ServeConfig().http.port}/health/ready" in probe
    compile(probe, "healthcheck", "exec")


def test_prometheus_scrapes_the_exporter_and_reads_the_charts_rules():
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"tessera:{ServeConfig().metrics.port}"]}]
    folder = PROMETHEUS["rule_files"][0].rpartition("/")[0]
    assert f"../helm/tessera/rules:{folder}:ro" in COMPOSE["services"]["prometheus"]["volumes"]


def test_grafana_reads_prometheus_and_the_charts_dashboards():
    (source,) = DATASOURCES["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    path = BOARDS["providers"][0]["options"]["path"]
    assert f"../helm/tessera/dashboards:{path}:ro" in COMPOSE["services"]["grafana"]["volumes"]


def test_no_password_has_a_default():
    password = COMPOSE["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert password.startswith("${GRAFANA_PASSWORD:?")


def test_the_gpu_file_changes_the_image_and_asks_for_gpus():
    service = GPU["services"]["tessera"]
    assert service["build"]["args"].keys() == COMPOSE["services"]["tessera"]["build"]["args"].keys()
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
