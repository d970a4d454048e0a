"""What the Llama family reads from configs."""

import pytest
from transformers import AutoConfig

from attention import LayerAttentionConfig
from tests.fakes.tiny_models import NATIVE, TinyModel, tiny_config
from workers.errors import ModelLoadError
from workers.models.llama_family import llama_family_spec, native_obstacle

FULL = LayerAttentionConfig()


def windowed(size: int) -> LayerAttentionConfig:
    return LayerAttentionConfig(sliding_window_size=size)


def test_mistral_windows_every_layer() -> None:
    assert llama_family_spec(tiny_config(NATIVE["mistral"])).layers == (windowed(9),) * 3


def test_a_null_window_is_full_attention() -> None:
    config = tiny_config(TinyModel("mistral", {"sliding_window": None}))
    assert llama_family_spec(config).layers == (FULL,) * 3


def test_qwen2_windows_the_layers_from_max_window_layers_on() -> None:
    spec = llama_family_spec(tiny_config(NATIVE["qwen2_windowed"]))
    assert spec.layers == (FULL, windowed(9), windowed(9))


def test_qwen2_ignores_a_window_it_does_not_use() -> None:
    config = tiny_config(TinyModel("qwen2", {"use_sliding_window": False, "sliding_window": 9}))
    assert llama_family_spec(config).layers == (FULL,) * 3


def test_head_dim_may_differ_from_the_share_of_hidden_size() -> None:
    assert llama_family_spec(tiny_config(NATIVE["qwen3"])).head_dim == 16
    assert llama_family_spec(tiny_config(NATIVE["qwen2"])).head_dim == 8


@pytest.mark.parametrize(
    ("name", "biases"),
    [
        ("llama3", (False, False, False)),
        ("llama_biased", (True, True, True)),
        ("qwen2", (True, False, False)),
        ("mistral", (False, False, False)),
    ],
)
def test_biases_are_where_the_family_has_them(name: str, biases: tuple[bool, ...]) -> None:
    spec = llama_family_spec(tiny_config(NATIVE[name]))
    assert (spec.has_qkv_bias, spec.has_o_bias, spec.has_mlp_bias) == biases


def test_another_activation_is_an_obstacle() -> None:
    config = tiny_config(TinyModel("llama", {"hidden_act": "gelu"}))
    with pytest.raises(ModelLoadError, match="silu activations only, not 'gelu'"):
        llama_family_spec(config)
    assert native_obstacle(config) == (
        "the native Llama family has silu activations only, not 'gelu'"
    )
    assert native_obstacle(tiny_config(NATIVE["llama3"])) is None


def test_a_stranger_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="gpt_neox"):
        llama_family_spec(AutoConfig.for_model("gpt_neox"))
