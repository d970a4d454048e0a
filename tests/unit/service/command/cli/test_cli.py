"""The command line: commands are found without being imported, bad settings end with code 2."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from service.cli import COMMANDS, app


def test_help_lists_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


def test_an_unknown_command_is_an_error():
    assert CliRunner().invoke(app, ["sevre"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "http.prot=1"], "http.prot"),
        (["--set", "nonsense"], "NAME=VALUE"),
        (["--port", "9000"], "must differ"),
        (["--config", "/absent.yaml"], "absent"),
        (["--proxy", "squid"], "http.proxy"),
        (["--kv-cache-dtype", "int4"], "engine.kv_cache_dtype"),
        (["--speculative", "guess"], "engine.speculative"),
    ],
)
def test_what_serve_cannot_use_is_named_before_anything_starts(arguments, message):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_the_process_that_serves_loads_neither_torch_nor_transformers():
    code = "import sys, service.command.serve; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_ingress_loads_no_torch():
    code = "import sys, service.app; print({'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["backends", "--device", "warp9"], 2, "no torch device"),
        (["generate", "--prompt", "x", "--engine", "attention_backend=nope"], 2, "there are:"),
        (
            ["generate", "--prompt=x", "--engine=device=cpu", "--engine=attention_backend=fa3"],
            2,
            "'fa3' was asked for but runs on cuda, not on CPU; what fits this model on CPU: torch_",
        ),
        (
            ["generate", "--prompt=x", "--engine=prefill_attention_backend=aiter"],
            2,
            "'aiter' was asked for but is a name only: nothing of it is built here",
        ),
        (["generate", "--prompt", "x", "/absent"], 1, "nor a folder with a model"),
        (["generate", "--prompt", "x", "--engine", "nope=1"], 2, "no such setting"),
        (
            ["bench", "--transport", "in-process", "--engine", "attention_backend=nope"],
            1,
            "there are:",
        ),
    ],
)
def test_what_a_command_cannot_use_is_one_readable_message(arguments, code, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_backends_of_a_device_that_is_not_there_is_one_readable_message():
    result = CliRunner().invoke(app, ["backends", "--device", "cuda"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_a_model_that_is_not_there_is_found_before_ray_starts():
    result = CliRunner().invoke(app, ["serve", "/absent"])
    assert result.exit_code == 1
    assert "nor a folder with a model" in result.output
