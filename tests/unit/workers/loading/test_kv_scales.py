"""Scales of an FP8 KV cache: every published name, and everything that can be wrong with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from workers.errors import ModelLoadError
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.kv_scales import is_kv_scale, read_kv_scales
from workers.loading.model_folder import read_hf_config

ATTENTION = "model.layers.{}.self_attn."
NAMES = {
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "llm-compressor": ("k_scale", "v_scale"),
    "older llm-compressor": ("k_proj.output_scale", "v_proj.output_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
}
STATIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    save_file({"model.norm.weight": torch.ones(2)} | tensors, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


def scales_of(names, num_layers=2, k=0.5, v=0.25):
    values = dict(zip(names, (k, v), strict=True))
    return {
        ATTENTION.format(layer) + name: torch.tensor(value + layer)
        for layer in range(num_layers)
        for name, value in values.items()
    }


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES.keys())
def test_every_published_name_is_read(tmp_path, names) -> None:
    checkpoint = checkpoint_of(tmp_path, scales_of(names))
    assert read_kv_scales(checkpoint, 2) == ((0.5, 0.25), (1.5, 1.25))


def test_one_scale_for_both_counts_twice(tmp_path) -> None:
    tensors = {ATTENTION.format(0) + "kv_scale": torch.tensor([0.5])}
    assert read_kv_scales(checkpoint_of(tmp_path, tensors), 1) == ((0.5, 0.5),)


def test_no_scales_are_no_scales(tmp_path) -> None:
    tensors = {ATTENTION.format(0) + "q_scale": torch.tensor(2.0)}
    assert read_kv_scales(checkpoint_of(tmp_path, tensors), 1) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q_scale", True),
        ("prob_output_scale", True),
        ("k_proj.weight", False),
        ("k_proj.weight_scale", False),
        ("k_proj.input_scale", False),
        ("q_proj.output_scale", False),
    ],
)
def test_only_attention_scales_are_recognised(name, expected) -> None:
    assert is_kv_scale(ATTENTION.format(3) + name) is expected


def test_a_layer_without_scales_is_an_error_that_names_it(tmp_path) -> None:
    checkpoint = checkpoint_of(tmp_path, scales_of(NAMES["modelopt"]))
    with pytest.raises(ModelLoadError, match="layer 2 lacks one"):
        read_kv_scales(checkpoint, 3)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_an_error(tmp_path, value) -> None:
    checkpoint = checkpoint_of(tmp_path, scales_of(NAMES["modelopt"], num_layers=1, k=value))
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj\.k_scale is"):
        read_kv_scales(checkpoint, 1)


def test_scales_by_head_are_an_error(tmp_path) -> None:
    tensors = scales_of(NAMES["llm-compressor"], num_layers=1)
    tensors[ATTENTION.format(0) + "k_scale"] = torch.ones(8)
    with pytest.raises(ModelLoadError, match=r"shape \(8,\); one scale for the whole tensor"):
        read_kv_scales(checkpoint_of(tmp_path, tensors), 1)


def folder_with(tmp_path: Path, quantisation: dict) -> Path:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation})
    )
    return folder


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": STATIC_FP8},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
    ids=["compressed-tensors", "modelopt"],
)
def test_a_checkpoint_with_a_quantised_cache_alone_is_accepted(tmp_path, quantisation) -> None:
    config = read_hf_config(folder_with(tmp_path, quantisation))
    assert getattr(config, "quantization_config", None) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_cache_scheme": STATIC_FP8 | {"type": "int"}}, "only static per-tensor FP8"),
        ({"kv_cache_scheme": STATIC_FP8 | {"dynamic": True}}, "only static per-tensor FP8"),
        ({"kv_cache_scheme": STATIC_FP8 | {"strategy": "attn_head"}}, "only static per-tensor"),
    ],
)
def test_any_other_quantisation_is_refused(tmp_path, change, why) -> None:
    quantisation = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC_FP8} | change
    with pytest.raises(ModelLoadError, match=why):
        read_hf_config(folder_with(tmp_path, quantisation))
