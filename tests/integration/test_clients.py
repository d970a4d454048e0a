"""Programs of tests/clients against the real service with the built-in model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client_environment import client_python
from tests.integration.services import running_service

CLIENTS = Path(__file__).parents[1] / "clients"
ROOT = CLIENTS.parents[1]


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"dtype": "float32", "check_integrity_when_idle": True}
    with running_service("clients", 18430, engine=engine) as running:
        yield running


def run(python, program, address):
    done = subprocess.run(
        [python, CLIENTS / f"{program}.py", address],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "program",
    [
        "anthropic_messages",
        "langchain_chat",
        "openai_agents",
        "openai_chat",
        "openai_responses",
        "pydantic_ai_agent",
        "vllm_bench",
    ],
)
def test_a_client_gets_what_it_expects(service, program):
    run(sys.executable, program, service.url)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "program", ["guidellm_benchmark", "instructor_models", "litellm_chat", "lm_eval_scores"]
)
def test_a_client_with_packages_of_its_own_gets_what_it_expects(service, program):
    run(client_python(), program, service.url)


def test_a_grpc_client_gets_what_it_expects(service):
    run(sys.executable, "grpc_inference", service.grpc_address)
