"""Ids of the hub where a command takes a model, over HF_ENDPOINT and HF_HOME as an operator sets
them: `tessera fetch`, `tessera generate`."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from service.cli import app
from service.command import fetch as fetch_module
from service.command.fetch import MARKER, TEXT_MARKER
from service.hub.store import HubStore
from tests.fakes.hub_server import FakeRepo, repo_of, running_hub
from workers.builtin import builtin_draft_path

ID = "owner/Tiny-1B"
MAIN = "from service.cli import main; main()"
# For tests of something else: asking whether an architecture is served takes seconds of imports.
UNASKED = "--any-architecture"


@pytest.fixture(scope="module")
def hub():
    repo = repo_of(builtin_draft_path())
    config = json.loads(repo.files["config.json"])
    strange = {**repo.files, "config.json": json.dumps({**config, "model_type": "x"}).encode()}
    with running_hub((ID, repo), ("owner/strange", FakeRepo(strange))) as running:
        yield running


@pytest.fixture
def fetch(hub, tmp_path, monkeypatch):
    """The command in this process, which has done the imports; tests of what an operator sets in
    the environment start one of their own."""
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Between attempts.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)

    def run(*arguments, endpoint=hub.url):
        store = partial(HubStore, endpoint=endpoint, cache_dir=tmp_path / "home")
        monkeypatch.setattr(fetch_module, "HubStore", store)
        return invoked("fetch", *arguments)

    return run


def invoked(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def tessera(hub, tmp_path):
    hub.requests.clear()

    def run(*arguments, **environment):
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        return subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **home, **environment},
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.nightly
def test_generate_takes_an_id_and_says_what_the_folder_says(tessera, hub):
    prompt = ("--prompt", "def main(", "--max-tokens", "8", "--json")
    by_id = tessera("generate", ID, *prompt)
    assert by_id.returncode == 0, by_id.stderr
    by_folder = CliRunner().invoke(app, ["generate", "builtin-draft", *prompt])
    assert json.loads(by_id.stdout)["token_ids"] == json.loads(by_folder.stdout)["token_ids"]
    hub.requests.clear()
    offline = tessera("generate", ID, *prompt, HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)["token_ids"] == json.loads(by_id.stdout)["token_ids"]
    assert hub.requests == []


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("fetch",)])
def test_an_architecture_that_is_not_served_costs_no_weights(
    fetch, hub, tmp_path, monkeypatch, command
):
    store = partial(HubStore, endpoint=hub.url, cache_dir=tmp_path / "home")
    monkeypatch.setattr("service.hub.store.HubStore", store)
    done = fetch("owner/strange") if command == ("fetch",) else invoked(*command, "owner/strange")
    assert done.exit_code == 1
    assert "model_type `x` is not known to transformers" in done.stderr.replace("'", "`")
    assert "config.json" in hub.fetched()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_an_architecture_that_is_served_is_fetched(fetch, hub):
    assert fetch(ID).exit_code == 0
    assert any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_model_that_is_nowhere_is_one_line(tessera):
    done = tessera("generate", "owner/none", "--prompt", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "neither builtin nor a folder, and the hub has no such model" in done.stderr
    assert "Traceback" not in done.stderr


def test_fetch_marks_a_folder_when_it_is_complete_and_then_leaves_it(tessera, fetch, hub, tmp_path):
    folder = tmp_path / "models" / "tiny"
    done = tessera("fetch", ID, "--to", str(folder), UNASKED)
    assert done.returncode == 0, done.stderr
    assert "100% of" in done.stderr
    marker = json.loads((folder / MARKER).read_bytes())
    assert marker == {"model": ID, "revision": None, "commit": hub.repos[ID].commit}
    hub.requests.clear()
    assert fetch(ID, "--to", str(folder)).exit_code == 0
    assert hub.requests == []
    other = fetch("owner/strange", "--to", str(folder))
    assert other.exit_code == 1
    assert f"holds {ID}" in other.stderr


@pytest.mark.nightly
def test_a_fetch_that_fails_leaves_no_marker(tessera, hub, tmp_path, monkeypatch):
    cuts = {"model.safetensors": [0] * 6}
    monkeypatch.setitem(hub.repos, "owner/cut", replace(hub.repos[ID], cuts=cuts))
    folder = tmp_path / "cut"
    done = tessera("fetch", "owner/cut", "--to", str(folder), UNASKED)
    assert done.returncode == 1
    assert "could not be fetched" in done.stderr
    assert not (folder / MARKER).exists()
    assert tessera("fetch", "owner/cut", "--to", str(folder), UNASKED).returncode == 0
    assert (folder / MARKER).exists()


def test_fetch_takes_ids_only(fetch):
    assert "is no id of the hub" in fetch("/models/tiny").stderr


def test_text_alone_has_a_marker_of_its_own(fetch, hub, tmp_path):
    folder = tmp_path / "tiny"
    done = fetch(ID, "--to", str(folder), "--text-only")
    assert done.exit_code == 0, done.stderr
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    assert (folder / TEXT_MARKER).exists()
    assert not (folder / MARKER).exists()
    hub.requests.clear()
    assert fetch(ID, "--to", str(folder), "--text-only").exit_code == 0
    assert hub.requests == []
    assert fetch(ID, "--to", str(folder), UNASKED).exit_code == 0
    assert (folder / "model.safetensors").exists()


def test_a_whole_folder_has_the_text_too(fetch, hub, tmp_path):
    folder = tmp_path / "tiny"
    assert fetch(ID, "--to", str(folder), UNASKED).exit_code == 0
    hub.requests.clear()
    assert fetch(ID, "--to", str(folder), "--text-only").exit_code == 0
    assert hub.requests == []


def test_half_a_folder_without_a_hub_is_no_success(fetch, tmp_path):
    """The hub library alone returns what lies there and a warning."""
    folder = tmp_path / "tiny"
    assert fetch(ID, "--to", str(folder), "--text-only").exit_code == 0
    done = fetch(ID, "--to", str(folder), UNASKED, endpoint="http://127.0.0.1:9")
    assert done.exit_code == 1
    assert not (folder / MARKER).exists()


@pytest.mark.parametrize("first", [(), ("--text-only",)])
def test_files_of_two_models_never_make_one_folder(fetch, hub, tmp_path, monkeypatch, first):
    """What the first one left would be read as the second one's."""
    files = {**hub.repos[ID].files, "generation_config.json": b'{"eos_token_id": 7}'}
    cuts = {"model.safetensors": [0] * 6}
    monkeypatch.setitem(hub.repos, "owner/other", FakeRepo(files, cuts=cuts))
    folder = tmp_path / "tiny"
    fetch("owner/other", "--to", str(folder), UNASKED, *first)
    assert (folder / "generation_config.json").exists()
    assert not (folder / MARKER).exists()
    second = fetch(ID, "--to", str(folder), UNASKED)
    assert (second.exit_code, (folder / MARKER).exists()) == (1, False)
    assert "holds owner/other" in second.stderr


def test_an_id_that_is_not_there_takes_no_folder(fetch, tmp_path):
    folder = tmp_path / "tiny"
    assert fetch("owner/tpyo", "--to", str(folder)).exit_code == 1
    assert fetch(ID, "--to", str(folder), UNASKED).exit_code == 0
