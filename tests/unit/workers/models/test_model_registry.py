"""Which implementation runs what, and what is refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.tiny_models import (
    MIXTURES,
    NATIVE,
    THROUGH_TRANSFORMERS,
    TinyModel,
    save_tiny_model,
)
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import LoadedModel, load_model
from workers.loading.model_folder import architecture_of, read_hf_config
from workers.models.registry import choose_implementation
from workers.parallel.group import SingleRank


def load(folder: Path, **changes: Any) -> LoadedModel:
    config = EngineConfig(model=str(folder), **changes)
    return load_model(config, SingleRank(), torch.device("cpu"), torch.float32)


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "olmo2"])
def test_unknown_families_go_through_transformers(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(THROUGH_TRANSFORMERS[name], tmp_path)
    assert load(folder).implementation == "transformers"
    with pytest.raises(ModelLoadError, match=r"no native class; native: LlamaForCausalLM"):
        load(folder, model_impl="native")


def test_what_states_a_native_architecture_and_does_not_fit_it_goes_through_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(TinyModel("llama", {"hidden_act": "gelu"}), tmp_path)
    assert load(folder).implementation == "transformers"
    assert "not 'gelu'; model_impl='transformers' may run it; it runs through" in caplog.text
    with pytest.raises(ModelLoadError, match="natively: .* not 'gelu'; model_impl='transformers'"):
        load(folder, model_impl="native")


@pytest.mark.parametrize(
    ("settings", "implementation"),
    [
        ({}, "transformers"),
        ({"speculative": "draft:builtin"}, "transformers"),
        ({"speculative": "ngram"}, "transformers"),
        ({"speculative": "mtp"}, "native"),
        ({"speculative": "eagle3:head"}, "native"),
        ({"speculative": "dflash:drafter"}, "native"),
        ({"speculative": "eagle3:head", "model_impl": "transformers"}, "transformers"),
    ],
    ids=["no_drafts", "draft", "ngram", "mtp", "eagle3", "dflash", "asked_for"],
)
def test_on_one_gpu_drafts_that_read_a_mixtures_states_have_it_run_natively(
    settings: dict[str, Any], implementation: str, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(save_tiny_model(MIXTURES["glm4_moe"], tmp_path)), **settings)
    hf_config = read_hf_config(tmp_path)
    chosen = choose_implementation(hf_config, architecture_of(hf_config), config, "cuda")
    assert chosen == implementation


@pytest.mark.parametrize(
    ("tiny", "settings", "reason"),
    [
        (MIXTURES["glm4_moe"], {"model_impl": "transformers"}, "model_impl='transformers' was"),
        (THROUGH_TRANSFORMERS["olmo2"], {}, "has no native class"),
    ],
    ids=["asked_for", "not_native"],
)
def test_transformers_reads_no_layer_for_multi_token_prediction(
    tiny: TinyModel, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tiny, tmp_path)
    with pytest.raises(ConfigError, match=rf"'mtp': .*ForCausalLM runs.*{reason}.*natively or"):
        load(folder, speculative="mtp", **settings)


def test_geometry_is_learnt_from_the_model(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["gemma2"], tmp_path)
    geometry = load(folder, model_impl="transformers").model.geometry
    assert (geometry.tp_q_head_num, geometry.tp_k_head_num, geometry.head_dim) == (8, 2, 8)
    assert [layer.sliding_window_size for layer in geometry.layers] == [9, -1, 9]
    assert {layer.logit_cap for layer in geometry.layers} == {2.0}


def test_sinks_are_learnt_from_the_model(tmp_path: Path) -> None:
    folder = save_tiny_model(MIXTURES["gpt_oss"], tmp_path)
    geometry = load(folder, model_impl="transformers").model.geometry
    assert all(layer.has_sinks for layer in geometry.layers)


def test_a_model_type_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="quux", architectures=["QuuxForCausalLM"])
    with pytest.raises(ModelLoadError, match="quux"):
        load(folder)


def test_code_that_a_folder_brings_along_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    folder = write_config(
        tmp_path, model_type="quux", architectures=["QuuxForCausalLM"], auto_map=auto_map
    )
    with pytest.raises(ModelLoadError):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForCausalLM"]}, "indexed"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model"),
        ({"model_type": "olmo2", "architectures": ["Olmo2Model"]}, "Olmo2ForCausalLM"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_what_cannot_be_served_is_refused_with_reason_and_alternatives(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = write_config(
        tmp_path, **config, vocab_size=131, max_position_embeddings=64, n_positions=64
    )
    with pytest.raises(ModelLoadError, match=f"{reason}.*Supported: native: LlamaForCausalLM"):
        load(folder)


def test_an_encoder_is_not_causal(tmp_path: Path) -> None:
    folder = save_tiny_model(TinyModel("bert"), tmp_path)
    with pytest.raises(ModelLoadError, match="BertSelfAttention is not causal"):
        load(folder)


class TwoRanks(SingleRank):
    size = 2


class ThreeRanks(SingleRank):
    size = 3


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    config = EngineConfig(model=str(folder), tp_size=3)
    with pytest.raises(ConfigError, match="num_attention_heads=8.*tp_size=3"):
        load_model(config, ThreeRanks(), torch.device("cpu"), torch.float32)


def test_an_encoder_decoder_on_ranks_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = write_config(
        tmp_path, model_type="bart", architectures=["BartForConditionalGeneration"]
    )
    with pytest.raises(ConfigError, match=r"BartForConditionalGeneration.*on one rank only so far"):
        load_model(EngineConfig(model=str(folder)), TwoRanks(), torch.device("cpu"), torch.float32)
