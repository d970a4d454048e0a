"""Programs of tests/clients against the real service with the built-in model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.services import running_service

CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"dtype": "float32", "check_integrity_when_idle": True}
    with running_service("clients", 18430, engine=engine) as running:
        yield running


@pytest.mark.parametrize("program", ["anthropic_messages", "openai_agents", "openai_responses"])
def test_a_client_gets_what_it_expects(service, program):
    done = subprocess.run(
        [sys.executable, str(CLIENTS / f"{program}.py"), service.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
