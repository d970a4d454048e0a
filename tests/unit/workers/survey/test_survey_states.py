"""States of models through transformers are counted as a start that loads them does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from service.cli import app
from tests.fakes.tiny_models import STATEFUL, TINY_MODELS, save_tiny_model
from tests.fakes.tiny_state_models import STATE_MODELS, save_state_model
from workers.config import EngineConfig
from workers.loading.loader import load_model
from workers.models.transformers_attention import NoAttention
from workers.parallel.group import SingleRank
from workers.runner.state_sizing import MIN_SNAPSHOTS
from workers.survey.survey import ModelSurvey, survey_model

NUM_REQUESTS = 5


def survey(folder: Path, gib: float | None = None, **changes: Any) -> ModelSurvey:
    settings = {"device": "cuda", "max_context_len": 128, **changes}
    config = EngineConfig(model=str(folder), max_running_requests=NUM_REQUESTS, **settings)
    return survey_model(config, gib, 64)


@pytest.mark.parametrize("model_type", STATE_MODELS)
def test_states_are_those_of_what_is_loaded(model_type: str, tmp_path: Path) -> None:
    save_state_model(model_type, tmp_path)
    shared: dict[str, Any] = {"model_impl": "transformers", "max_context_len": 128}
    config = EngineConfig(model=str(tmp_path), **shared)
    loaded = load_model(config, SingleRank(), torch.device("cpu"), torch.float32)
    entries = loaded.model.state_entries
    found = survey(tmp_path, device="cpu", model_impl="transformers").memory
    assert found.states_are_known
    assert found.states is not None
    assert found.states.num_modules == len(entries) > 0
    assert found.states.bytes_a_request == sum(entry.bytes_per_slot for entry in entries)


@pytest.mark.parametrize("model_impl", ["transformers", "native"])
def test_slots_and_snapshots_take_memory_from_tokens(model_impl: str, tmp_path: Path) -> None:
    folder = save_tiny_model(STATEFUL["qwen3_next"], tmp_path)
    found = survey(folder, 0.01, model_impl=model_impl)
    fit, states = found.memory.fit, found.memory.states
    assert fit is not None
    assert states is not None
    # A slot of padded rows beside those of requests; as many snapshots as the least.
    assert fit.num_snapshots == MIN_SNAPSHOTS
    assert fit.state_bytes == (NUM_REQUESTS + 1 + MIN_SNAPSHOTS) * states.bytes_a_request
    uncached = survey(folder, 0.01, model_impl=model_impl, enable_prefix_cache=False).memory.fit
    assert uncached is not None
    assert uncached.num_snapshots == 0
    assert uncached.state_bytes == (NUM_REQUESTS + 1) * states.bytes_a_request


def test_ranks_that_join_what_they_computed_keep_whole_states(tmp_path: Path) -> None:
    folder = save_tiny_model(STATEFUL["qwen3_next"], tmp_path)
    one, two = (
        survey(folder, device="cpu", model_impl="transformers", tp_size=size) for size in (1, 2)
    )
    assert two.memory.weight_bytes < one.memory.weight_bytes
    assert two.memory.states == one.memory.states is not None


def test_states_that_only_values_show_are_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(STATEFUL["qwen3_next"], tmp_path)

    def attend(*_: object) -> torch.Tensor:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(NoAttention, "attend", attend)
    asked = ["models", str(folder), "--gpu-memory-gib", "1"]
    told = CliRunner().invoke(app, asked).output
    assert "states                      unknown: they show when it is loaded\n" in told
    assert ", states unknown\n" in told
    assert " at most: its states are not counted\n" in told
    memory = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["memory"]
    assert (memory["states_are_known"], memory["states"]) == (False, None)
    assert memory["fit"]["state_bytes"] is None


def test_a_model_without_states_has_no_word_of_them(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY_MODELS["llama3"], tmp_path)
    found = survey(folder, 0.01)
    assert found.memory.states_are_known
    assert found.memory.states is None
    told = CliRunner().invoke(app, ["models", str(folder), "--gpu-memory-gib", "1"]).output
    assert ", states" not in told
    assert "\nstates" not in told
