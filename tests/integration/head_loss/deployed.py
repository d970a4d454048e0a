"""What Serve builds when the applications are deployed as KubeRay deploys them, by import path."""

from collections.abc import Mapping
from typing import Any

from ray import serve

from service.app import build_app
from service.deployments.engine_factory import create_engine
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.chaos.applications import FAKE, REAL, VOCAB_SIZE


def build(args: Mapping[str, Any]) -> serve.Application:
    """args: `application`, the name of one of the chaos run; `step_s`, the fake engine's pace."""
    application = {one.name: one for one in (FAKE, REAL)}[args["application"]]
    fake = FakeEngineFactory(step_s=args["step_s"], vocab_size=VOCAB_SIZE)
    return build_app(application.config, fake if application.is_fake else create_engine)
