"""From an operator's words to an engine's folder; what is an id and what is a folder."""

from functools import partial

import huggingface_hub.constants
import pytest

from service.config import parse_config
from service.hub.progress import SteadyProgress
from service.hub.resolve import resolve_engine, text_folder
from service.hub.store import HubStore
from service.model_names import is_hub_id, model_name
from tests.fakes.hub_server import repo_of, running_hub
from workers.builtin import builtin_draft_path
from workers.config import EngineConfig
from workers.errors import ConfigError

ID = "owner/Tiny-1B"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub((ID, repo_of(builtin_draft_path()))) as running:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        local = partial(HubStore, running.url, tmp_path / "cache")
        monkeypatch.setattr("service.hub.store.HubStore", local)
        yield running


@pytest.mark.parametrize(
    "text", ["builtin", "builtin-draft", "/models/a", "./a/b", "~/a", "a/b/c", "a//b", "", "a/..b"]
)
def test_what_is_no_id(text):
    assert not is_hub_id(text)


@pytest.mark.parametrize("text", ["gpt2", ID, "meta-llama/Llama-3.1-8B-Instruct"])
def test_what_is_an_id(text):
    assert is_hub_id(text)
    assert model_name(text) == text


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "Tiny-1B").mkdir(parents=True)
    assert not is_hub_id(ID)
    assert model_name(ID) == "Tiny-1B"


def test_an_engine_gets_a_folder_and_keeps_its_name(hub):
    told = []
    config = resolve_engine(EngineConfig(model=ID), None, lambda *now: told.append(now))
    assert config.served_model_name == ID
    assert (text_folder(config.model, None) / "model.safetensors").is_file()
    assert told[-1][0] == told[-1][1] > 0


def test_dummy_weights_fetch_none(hub):
    resolve_engine(EngineConfig(model=ID, load_format="dummy"), None, lambda *now: None)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_tokenizer_fetches_no_weights(hub):
    assert (text_folder(ID, None) / "tokenizer.json").is_file()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_settings_that_do_not_fit_the_model_cost_no_weights(hub):
    with pytest.raises(ConfigError, match="max_context_len"):
        resolve_engine(EngineConfig(model=ID, max_context_len=1 << 30), None, lambda *now: None)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_ranks_that_cannot_share_the_model_cost_no_weights(hub):
    config = EngineConfig(model=ID, model_impl="transformers", tp_size=7)
    with pytest.raises(ConfigError, match="on one rank only: .*q_proj.weight has 256"):
        resolve_engine(config, None, lambda *now: None)
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_the_id_is_the_served_name_and_takes_a_revision():
    config = parse_config({"engine": {"model": ID, "revision": "refs/pr/1"}})
    assert config.served_models()[0].name == ID
    with pytest.raises(ConfigError, match="revision is for models of the hub"):
        parse_config({"engine": {"model": "/models/tiny", "revision": "main"}})


def test_progress_is_passed_on_seldom_but_to_the_end():
    told, now_s = [], [0.0]
    steady = SteadyProgress(lambda *now: told.append(now), lambda: now_s[0], interval_s=1.0)
    for done in (1, 2, 3, 3, 2):
        steady(done, 10)
    now_s[0] = 1.5
    steady(4, 10)
    steady(10, 10)
    assert told == [(1, 10), (4, 10), (10, 10)]
