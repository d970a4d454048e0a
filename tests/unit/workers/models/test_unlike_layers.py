"""What the probe learns of models whose layers are not alike, and what it refuses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import AttentionHeads
from tests.fakes.architecture_trial import Outcome, Verdict, run_trial
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_reference import build_reference, config_of, random_prompt, reference_logits
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.layers.temperature import PositionTemperature
from workers.loading.loader import LoadedModel, load_model
from workers.models.base import AttentionGeometry
from workers.parallel.group import SingleRank


def load(folder: Path) -> LoadedModel:
    config = EngineConfig(model=str(folder), model_impl="transformers")
    return load_model(config, SingleRank(), torch.device("cpu"), torch.float32)


def geometry_of(
    folder: Path, model_type: str, class_name: str, **changes: Any
) -> AttentionGeometry:
    build_reference(config_of(model_type, class_name, changes), class_name, folder)
    return load(folder).model.geometry


def test_layers_that_bring_the_k_and_v_of_another_one_store_none(tmp_path: Path) -> None:
    geometry = geometry_of(tmp_path, "gemma3n_text", "Gemma3nForCausalLM")
    assert [layer.kv_layer_id for layer in geometry.layers] == [None, None, 0, 1]
    assert [layer.sliding_window_size for layer in geometry.layers] == [9, -1, 9, -1]
    assert [layer.heads for layer in geometry.layers] == [None] * 4
    config = geometry.attention_config(64, 16, torch.float32, torch.float32, torch.device("cpu"))
    assert config.kv_bytes_per_token == 2 * 2 * (16 + 16) * 4


def test_layers_say_where_their_heads_differ_from_most(tmp_path: Path) -> None:
    geometry = geometry_of(
        tmp_path,
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        layer_types=["full_attention", *["sliding_attention"] * 3],
    )
    assert (geometry.tp_q_head_num, geometry.tp_k_head_num) == (4, 4)
    first, *others = geometry.layers
    assert first.heads == AttentionHeads(4, 2, geometry.head_dim, geometry.v_head_dim)
    assert [layer.heads for layer in others] == [None] * 3


def test_chunks_are_as_long_as_the_config_says_where_its_layer_types_have_them(
    tmp_path: Path,
) -> None:
    geometry = geometry_of(tmp_path, "llama4_text", "Llama4ForCausalLM", attention_chunk_size=7)
    assert [layer.chunk_size for layer in geometry.layers] == [7, -1, 7, -1]


@pytest.mark.parametrize("chunk_size", [None, 0])
def test_chunks_without_a_length_are_refused(tmp_path: Path, chunk_size: int | None) -> None:
    geometry_of(tmp_path, "llama4_text", "Llama4ForCausalLM")
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    old, new = (
        '"attention_chunk_size": ' + one for one in ("9", "null" if chunk_size is None else "0")
    )
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="chunked attention needs an attention_chunk_size"):
        load(tmp_path)


def test_a_query_s_temperature_follows_its_position_in_its_own_row(tmp_path: Path) -> None:
    """In a flat batch and in later chunks a token's place in the call is not its position."""
    config = config_of("llama4_text", "Llama4ForCausalLM", {"floor_scale": 4, "attn_scale": 2.0})
    reference = build_reference(config, "Llama4ForCausalLM", tmp_path)
    loaded = load(tmp_path)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    first, second = random_prompt(20), random_prompt(23)
    outs = [rows.step({0: first[:9], 1: second}), rows.step({0: first[9:]})]
    got = torch.cat([outs[0][0], outs[1][0]])
    torch.testing.assert_close(got, reference_logits(reference, first), rtol=0, atol=1e-4)
    want = reference_logits(reference, second)
    torch.testing.assert_close(outs[0][1], want, rtol=0, atol=1e-4)


def test_temperature_changes_nothing_before_its_first_step() -> None:
    temperature = PositionTemperature(floor_scale=8, attn_scale=0.5)
    q = torch.ones(3, 2, 4)
    scaled = temperature.scaled(q, torch.tensor([0, 6, 7]))
    assert torch.equal(scaled[:2], q[:2])
    expected = 0.5 * torch.log1p(torch.tensor(1.0)) + 1.0
    torch.testing.assert_close(scaled[2], q[2] * expected)


@pytest.mark.parametrize(
    ("model_type", "class_name", "changes"),
    [
        # Holds a language model, head and all, whose body has another name than its class says.
        ("llama4", "Llama4ForConditionalGeneration", {}),
        ("gemma4", "Gemma4ForConditionalGeneration", {}),
        # One K for both, and windowed layers alone.
        ("gemma4_text", "Gemma4ForCausalLM", {"attention_k_eq_v": True}),
        ("gemma4_text", "Gemma4ForCausalLM", {"num_kv_shared_layers": 0}),
    ],
)
def test_text_is_that_of_transformers(
    model_type: str, class_name: str, changes: Mapping[str, Any]
) -> None:
    outcome = run_trial(model_type, class_name, changes)
    assert outcome.verdict == Verdict.SERVED, outcome.reason


@pytest.mark.parametrize(
    ("model_type", "class_name", "reason"),
    [
        (
            "blip-2",
            "Blip2ForConditionalGeneration",
            "Blip2ForConditionalGeneration takes no text without pixel_values",
        ),
        # Reads the KV cache of another model.
        (
            "gemma4_unified_assistant",
            "Gemma4UnifiedAssistantForCausalLM",
            "Gemma4UnifiedAssistantForCausalLM cannot run as a flat decoder: inputs_embeds and "
            "shared_kv_states cannot be None.; row by row it takes no cache",
        ),
        pytest.param(
            "diffusion_gemma",
            "DiffusionGemmaForBlockDiffusion",
            "DiffusionGemmaDecoderTextAttention is not causal; row by row it does not count "
            "positions from 0",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    model_type: str, class_name: str, reason: str
) -> None:
    assert run_trial(model_type, class_name) == Outcome(Verdict.REFUSED, reason)
