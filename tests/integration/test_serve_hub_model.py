"""`tessera serve owner/model`: fetched, served under its id, refused before its weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.fakes.hub_server import FakeRepo, repo_of, running_hub
from workers.builtin import builtin_draft_path

ROOT = Path(__file__).parents[2]
ID = "owner/Tiny-1B"
PORT = 18640
SERVE = (
    *(sys.executable, "-c", "from service.cli import main; main()", "serve"),
    *(f"--port={PORT}", f"--grpc-port={PORT + 1}", f"--metrics-port={PORT + 2}"),
)


@pytest.fixture
def hub():
    with running_hub((ID, repo_of(builtin_draft_path()))) as running:
        yield running


@pytest.fixture
def environment(hub, tmp_path):
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    return {**os.environ, **ray, **own}


# Each half is tested where it is cheap: what is fetched in tests/unit/service/hub, what is served
# and what ends a start in test_serve_command.py.
@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_of_the_hub_is_served_under_its_id(hub, environment):
    with subprocess.Popen(
        [*SERVE, ID],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("curl http://127.0.0.1"):
                    break
            url = f"http://127.0.0.1:{PORT}"
            served = httpx.get(f"{url}/v1/models").json()["data"]
            body = {"model": ID, "prompt": "def", "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        finally:
            process.terminate()
            process.wait(60)
    assert [model["id"] for model in served] == [ID], "".join(lines)
    assert answer.status_code == 200
    assert answer.json()["model"] == ID
    assert "model.safetensors" in hub.fetched()


@pytest.mark.slow
@pytest.mark.nightly
def test_an_unsupported_model_ends_the_start_before_its_weights(hub, environment):
    files = hub.repos[ID].files
    config = {**json.loads(files["config.json"]), "architectures": ["NopeForCausalLM"]}
    config["model_type"] = "bert"
    hub.repos[ID] = FakeRepo({**files, "config.json": json.dumps(config).encode()})
    done = subprocess.run(
        [*SERVE, ID],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert f"tessera serve: {ID}: NopeForCausalLM" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
