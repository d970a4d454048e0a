"""deploy/serve-config.yaml: what `serve deploy` and the service accept, without a cluster."""

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from service.app import build
from service.config import ServeConfig, load_config

CONFIG = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "serve-config.yaml").read_text())
(APPLICATION,) = CONFIG["applications"]


def test_serve_deploy_accepts_it():
    schema = ServeDeploySchema.model_validate(CONFIG)
    assert set(CONFIG) <= set(ServeDeploySchema.model_fields)
    assert set(APPLICATION) <= set(type(schema.applications[0]).model_fields)
    assert schema.applications[0].import_path == "service.app:build"


def test_it_starts_no_proxy_that_nobody_asked_for():
    assert CONFIG["proxy_location"] == "Disabled"
    assert APPLICATION["args"]["http"]["proxy"] == "direct"


def test_its_arguments_are_settings():
    config = load_config(None, {}, APPLICATION["args"])
    assert config.app_name == APPLICATION["name"]


def test_it_serves_on_the_ports_that_the_documentation_names():
    config, default = load_config(None, {}, APPLICATION["args"]), ServeConfig()
    assert (config.http, config.grpc) == (default.http, default.grpc)
    assert (config.metrics.host, config.metrics.port) == ("127.0.0.1", default.metrics.port)


def test_the_application_can_be_built_from_it():
    ingress = build(APPLICATION["args"])._bound_deployment
    assert ingress.name == "Ingress"
    assert ingress.init_args[2]._bound_deployment.ray_actor_options["num_gpus"] == 0
