"""deploy/serve-config-models.yaml: two models as `serve deploy` and the service accept them."""

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from service.app import build
from service.config import load_config

FILE = Path(__file__).parents[3] / "deploy" / "serve-config-models.yaml"
CONFIG = yaml.safe_load(FILE.read_text())
(APPLICATION,) = CONFIG["applications"]


def test_serve_deploy_accepts_it():
    schema = ServeDeploySchema.model_validate(CONFIG)
    assert schema.applications[0].import_path == "service.app:build"


def test_its_models_are_those_of_the_service():
    models = load_config(None, {}, APPLICATION["args"]).served_models()
    assert {model.name: model.engine.model for model in models} == {
        "code": "builtin",
        "draft": "builtin-draft",
    }
    assert [model.replica.cpus_per_rank for model in models] == [1, 0.5]


def test_the_deployments_that_its_comments_name_are_those_that_are_built():
    ingress = build(APPLICATION["args"])._bound_deployment
    _, _, *engines = ingress.init_args
    names = {engine._bound_deployment.name for engine in engines}
    assert names == {"Engine-code", "Engine-draft"}
    assert all(name in FILE.read_text() for name in names)
