"""deploy/serve-config.yaml through Serve's own declarative way, as `serve deploy` hands it over."""

import copy
from pathlib import Path

import httpx
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from service.config import load_config
from service.deployments.control_plane import close_control_plane
from tests.integration.services import (
    READY_TIMEOUT_S,
    RunningService,
    grpc_text,
    http_text,
    is_ready,
    wait_until,
)

FILE = Path(__file__).parents[2] / "deploy" / "serve-config.yaml"
PORT = 18690


def test_the_file_serves_the_built_in_model(ray_session):
    config = copy.deepcopy(yaml.safe_load(FILE.read_text()))
    (application,) = config["applications"]
    # Ports that no other test uses; the rest is the file as it stands.
    for index, section in enumerate(("http", "grpc", "metrics")):
        application["args"][section]["port"] = PORT + index
    name = application["name"]
    service = RunningService(load_config(None, {}, application["args"]))
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
    try:
        wait_until(lambda: is_ready(service.url), READY_TIMEOUT_S)
        # An ingress is ready as soon as an engine is; Serve looks at both a moment later.
        wait_until(lambda: serve.status().applications[name].status.value == "RUNNING")
        text = http_text(service, "import os\n", 8)
        assert text
        assert grpc_text(service, "import os\n", 8) == text
        assert "tessera_live_requests" in httpx.get(service.metrics_url).text
    finally:
        serve.delete(name)
        close_control_plane(name)
