"""Whether a model takes adapters, and what their slots take."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli import app
from tests.fakes.tiny_models import STATEFUL, TINY_MODELS, save_tiny_model
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.survey.survey import ModelSurvey, survey_model

NUM_SLOTS, RANK = 3, 4


def survey(folder: Path, **changes: Any) -> ModelSurvey:
    settings = {"device": "cuda", "dtype": "bfloat16", **changes}
    return survey_model(EngineConfig(model=str(folder), **settings), 1.0, 64)


def test_slots_are_counted_and_taken_from_tokens(tmp_path: Path) -> None:
    tiny = TINY_MODELS["qwen3_moe"]
    folder = save_tiny_model(tiny, tmp_path)
    slots = {"max_loras": NUM_SLOTS, "max_lora_rank": RANK}
    plain, projections = survey(folder).memory, survey(folder, **slots).memory
    assert plain.adapter_bytes == 0 < projections.adapter_bytes
    assert plain.fit is not None
    assert projections.fit is not None
    assert projections.fit.kv_bytes == plain.fit.kv_bytes - projections.adapter_bytes

    def beside_projections(**targets: bool) -> int:
        return survey(folder, **slots, **targets).memory.adapter_bytes - projections.adapter_bytes

    # Of three layers the second is a mixture.
    num_slots, hidden, vocab, layers = NUM_SLOTS + 1, 64, 131, 1
    experts, width = tiny.changes["num_experts"], tiny.changes["moe_intermediate_size"]
    # Two bytes a number of 16 bits, and four for the rank of each matrix of a slot.
    of_embedding = num_slots * ((vocab + hidden) * RANK * 2 + 4)
    of_experts = num_slots * layers * (experts * 3 * (hidden + width) * RANK * 2 + 3 * 4)
    assert beside_projections(lora_embeddings=True) == of_embedding
    assert beside_projections(lora_experts=True) == of_experts
    told = CliRunner().invoke(
        app, ["models", str(folder), "--dtype", "bfloat16", "--max-loras", "3", "--lora-experts"]
    )
    assert "slots of adapters " in told.output


def test_what_a_start_refuses_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY_MODELS["qwen3_moe"], tmp_path)
    with pytest.raises(ConfigError, match="tp_size has to be 1"):
        survey(folder, max_loras=1, lora_embeddings=True, tp_size=2)
    with pytest.raises(ConfigError, match="models of fused layers take adapters"):
        survey(folder, max_loras=1, dtype="float32", model_impl="native")
    with pytest.raises(ConfigError, match="takes no adapters as it is run"):
        survey(folder, max_loras=1, dtype="float32")
    assert list(survey(folder, max_loras=1, lora_embeddings=True).ranks) == [1]


def test_what_the_native_class_could_is_said_where_transformers_runs_it(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY_MODELS["qwen3_moe"], tmp_path / "mixture")
    # Not measured natively, and without fused layers.
    unfused = survey(folder, dtype="float32")
    assert unfused.runs == "transformers"
    assert "models of fused layers take adapters" in unfused.features["LoRA"]
    assert unfused.features["quantised weights"] == ""
    assert survey(folder, dtype="float32", quantization="fp8").runs == "native"
    asked = survey(folder, model_impl="transformers").features
    assert asked["LoRA"].endswith("the native class does, with --model-impl native")
    assert asked["quantised weights"].endswith("the native class does, with --model-impl native")
    assert survey(folder, model_impl="native").features["LoRA"] == ""
    assert survey(folder, model_impl="native", dtype="float32").features["LoRA"]
    assert survey(folder, device="cpu", dtype="float32").features["LoRA"] == ""
    stateful = save_tiny_model(STATEFUL["qwen3_next"], tmp_path / "stateful")
    told = CliRunner().invoke(app, ["models", str(stateful), "--dtype", "bfloat16"]).output
    assert "runs                        transformers" in told
    assert "quantised weights           yes: a quantised checkpoint, or --quantization," in told


def test_llama_4_is_read_in_no_format_either_way(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY_MODELS["llama4"], tmp_path)
    for model_impl in ("auto", "native"):
        found = survey(folder, model_impl=model_impl).features["quantised weights"]
        assert found == "of stacked experts only gpt-oss's are read in a format"
    with pytest.raises(ModelLoadError, match=r"gate_up_proj is quantised: .* only gpt-oss's are"):
        survey(folder, quantization="fp8")
