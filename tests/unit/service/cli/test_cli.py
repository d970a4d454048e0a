"""The command line: commands are found without being imported, bad settings end with code 2."""

import subprocess
import sys

import pytest
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
    ],
)
def test_what_serve_cannot_use_is_named_before_anything_starts(arguments, message):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_the_process_that_serves_loads_neither_torch_nor_transformers():
    code = "import sys, service.serve_command; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_ingress_loads_no_torch():
    code = "import sys, service.app; print({'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
