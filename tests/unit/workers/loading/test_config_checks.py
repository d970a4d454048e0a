"""Sizes that no model has are refused by name before anything is built of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.fakes.tiny_models import NATIVE, THROUGH_TRANSFORMERS, TINY_MODELS, tiny_config
from workers import Engine
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.config_checks import check_config

ODDITIES = [
    ({"num_key_value_heads": 3}, "num_attention_heads=8 is no multiple of num_key_value_heads=3"),
    ({"num_key_value_heads": 16}, "num_attention_heads=8 is no multiple of num_key_value_heads=16"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0 is less than 1"),
    ({"num_key_value_heads": -2}, "num_key_value_heads=-2 is less than 1"),
    ({"num_attention_heads": -2}, "num_attention_heads=-2 is less than 1"),
    # Some configs divide by it while transformers reads them.
    ({"num_attention_heads": 0}, "num_attention_heads=0 is less than 1"),
    ({"head_dim": 0}, "head_dim=0 is less than 1"),
    ({"head_dim": -16}, "head_dim=-16 is less than 1"),
    ({"hidden_size": -64}, "hidden_size=-64 is less than 1"),
    ({"vocab_size": -3}, "vocab_size=-3 is less than 1"),
    ({"intermediate_size": 10**14}, "intermediate_size=100000000000000 is more than 2147483647"),
    # Some configs have a kind for each layer.
    ({"num_hidden_layers": 10**6}, r"=1000000 is more than 10000|\(1000000\) must be equal to"),
    ({"intermediate_size": 1 << 99}, "intermediate_size=633825300114114700748351602688 is more"),
]
MODELS = {
    "native": NATIVE["llama3"],
    "through": THROUGH_TRANSFORMERS["olmo2"],
    "within_a_wrapper": TINY_MODELS["gemma3_with_images"],
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("changes", "message"), ODDITIES, ids=str)
def test_odd_sizes_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stated = tiny_config(MODELS[name]).to_dict()
    stated.get("text_config", stated).update(changes)
    architecture = {"architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(architecture | stated))
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    with pytest.raises(ModelLoadError, match=message) as refused:
        Engine.from_config(config)
    assert str(tmp_path / "config.json") in str(refused.value)


def test_what_a_family_does_not_read_may_be_anything() -> None:
    latent = {"qk_nope_head_dim": 12, "head_dim": 0}
    check_config(Path("config.json"), AutoConfig.for_model("llama", **latent))


def test_sizes_are_looked_at_under_the_familys_own_names() -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads=-1 is less than 1"):
        check_config(Path("config.json"), AutoConfig.for_model("gpt2", n_head=-1))
