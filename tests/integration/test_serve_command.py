"""`tessera serve` as a process: it comes up, says where, drains on SIGTERM and ends cleanly."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.contained import contained, terminate
from tests.integration.serve_fake_engine import PORTS

ROOT = Path(__file__).parents[2]
URL = f"http://127.0.0.1:{PORTS['http']}"


@contextlib.contextmanager
def serving(**environment: str):
    """The command as a child process that has said how to call it."""
    process = subprocess.Popen(
        contained(sys.executable, "-m", "tests.integration.serve_fake_engine"),
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("curl http://127.0.0.1"):
                break
        else:
            raise AssertionError(f"ended with {process.wait()}:\n{''.join(said)}")
        assert httpx.get(f"{URL}/health/ready").status_code == 200
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_sigterm_drains_then_ends_with_zero():
    body = {"model": "builtin", "prompt": "def", "max_tokens": 300, "stream": True}
    short = {"model": "builtin", "prompt": "def", "max_tokens": 1}
    with (
        serving() as process,
        httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        terminate(process)
        # Until the signal has come to whoever accepts requests; the stream lives for six seconds.
        while (late := httpx.post(f"{URL}/v1/completions", json=short, timeout=60)).is_success:
            time.sleep(0.05)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


@pytest.mark.nightly
def test_it_comes_up_where_rays_agent_is_late_once(tmp_path):
    late = ROOT / "tests" / "fakes" / "late_agent"
    was_late = tmp_path / "late"
    with serving(PYTHONPATH=str(late), LATE_AGENT=str(was_late)):
        assert was_late.exists()


@pytest.mark.slow
def test_a_port_that_is_taken_is_a_readable_error():
    with socket.create_server(("127.0.0.1", PORTS["metrics"])):
        done = subprocess.run(
            contained(sys.executable, "-m", "tests.integration.serve_fake_engine"),
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert "metrics.port: cannot listen on 127.0.0.1" in done.stdout


@pytest.mark.slow
def test_what_only_an_engine_can_tell_ends_the_start_at_once_with_its_message():
    ports = [
        f"--{name}={18990 + i}" for i, name in enumerate(("port", "grpc-port", "metrics-port"))
    ]
    done = subprocess.run(
        contained(
            sys.executable,
            "-c",
            "from service.cli import main; main()",
            "serve",
            *ports,
            "--decode-attention-backend=flashmla",
            "--set=engine.device=cpu",
        ),
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    message = "builtin: attention backend 'flashmla' was asked for but runs on cuda, not on CPU; "
    remedy = "what fits this model on CPU: torch_native (without a name one is chosen)"
    assert f"tessera serve: {message}{remedy}" in done.stderr
    assert "Traceback" not in done.stderr
