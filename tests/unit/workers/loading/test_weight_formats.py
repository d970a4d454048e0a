"""Quantised checkpoints: every format gives its dequantised model's logits, on 1 and 2 ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import ModelRows
from tests.fakes.quantised_checkpoints import FP8, by_scale, quantise_folder
from tests.fakes.quantised_recipes import CASES, FLOAT8, INT4, TINY, Case, of_all, scheme
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import TinyModel, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.format import Cut
from workers.layers.formats.scaled import Scaled
from workers.layers.formats.scaling import PerChannel
from workers.layers.formats.stored import StoredWeight
from workers.loading.loader import load_model
from workers.loading.model_folder import read_hf_config
from workers.loading.quantization.patterns import stated_expression
from workers.parallel.group import SingleRank, TPGroup

CPU = torch.device("cpu")


def logits(folder: Path, tp: TPGroup, **changes: Any) -> torch.Tensor:
    config = EngineConfig(model=str(folder), model_impl="native", tp_size=tp.size, **changes)
    with torch.inference_mode(False):  # as an engine loads, also within ThreadRanks
        loaded = load_model(config, tp, CPU, torch.float32)
    with torch.inference_mode():
        return ModelRows(loaded, DenseAttention()).step({0: random_prompt(12)})[0]


def on_two_ranks(folder: Path, **changes: Any) -> torch.Tensor:
    return ThreadRanks(2).run(lambda tp: logits(folder, tp, **changes))[1]


def of_transformers(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_config(read_hf_config(folder))
    model.load_state_dict(weights, strict=True)
    with torch.inference_mode():
        return model.eval()(torch.tensor([random_prompt(12)])).logits[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_quantised_model_is_its_dequantised_one(tmp_path: Path, case: Case) -> None:
    folder = save_tiny_model(case.tiny, tmp_path)
    weights = quantise_folder(folder, case.config, case.quantiser_of)
    alone = logits(folder, SingleRank())
    torch.testing.assert_close(alone, of_transformers(folder, weights), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(on_two_ranks(folder), alone, rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_to_fp8_while_loading(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    plain = load_file(folder / "model.safetensors")
    rounded = {
        name: by_scale(FP8, (1, 0))(tensor).matrix if name.endswith("_proj.weight") else tensor
        for name, tensor in plain.items()
    }
    alone = logits(folder, SingleRank(), quantization="fp8")
    torch.testing.assert_close(alone, of_transformers(folder, rounded), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(on_two_ranks(folder, quantization="fp8"), alone)
    assert not torch.allclose(alone, logits(folder, SingleRank()), atol=1e-3)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    quantise_folder(folder, CASES["awq"].config, CASES["awq"].quantiser_of)
    (folder / "model.safetensors").unlink()
    alone = logits(folder, SingleRank(), load_format="dummy")
    torch.testing.assert_close(on_two_ranks(folder, load_format="dummy"), alone)
    assert alone.isfinite().all()
    assert alone.std() > 0.0


def test_a_cut_inside_of_a_block_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantise_folder(folder, config, of_all(by_scale(FP8, (32, 32), "weight_scale_inv")))
    with pytest.raises(ConfigError, match=r"[kv]_proj, fp8 .*\[0, 16\) of 32, inside of blocks"):
        on_two_ranks(folder)


def test_a_tensor_of_another_dtype_than_the_recipe_says_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    quantise_folder(folder, CASES["awq"].config, CASES["awq"].quantiser_of)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.qweight"
    save_file(tensors | {name: tensors[name].float()}, path)
    with pytest.raises(
        ModelLoadError, match=r"up_proj\.qweight has dtype torch\.float32, awq int4"
    ):
        logits(folder, SingleRank())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes'.*supported are"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo='NVFP4'; supported: .*FP8",
        ),
        (
            scheme("nvfp4-pack-quantized", {**FLOAT8, "num_bits": 4}),
            "nvfp4-pack-quantized.*float 4",
        ),
        (scheme("int-quantized", {"symmetric": False}), "symmetric=False"),
        (scheme("marlin-24", dict(INT4)), "marlin-24"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3; supported: 2, 4, 8"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, r"quant_algo=\['FP8'\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
        ({"quant_method": "gptq", "bits": 4.0}, "bits=4.0; supported"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:12],
)
def test_an_unknown_recipe_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": config})
    )
    with pytest.raises(ModelLoadError, match=why):
        read_hf_config(tmp_path)


def test_what_a_module_cannot_be_made_of_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    case = CASES["gptq act-order"]
    quantise_folder(folder, case.config, case.quantiser_of)
    path, module = folder / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(path)
    save_file(tensors | {f"{module}.g_idx": tensors[f"{module}.g_idx"] - 1}, path)
    with pytest.raises(ModelLoadError, match=rf"{module}, gptq .*: g_idx says groups -1 to"):
        logits(folder, SingleRank())
    scales = tensors[f"{module}.scales"].clone()
    scales[0, 3] = torch.inf
    save_file(tensors | {f"{module}.scales": scales}, path)
    with pytest.raises(ModelLoadError, match=f"{module} has scales or values that are not finite"):
        logits(folder, SingleRank())


@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (6,)])
def test_scales_lie_where_they_belong_in_any_shape(
    shape: tuple[int, ...],
) -> None:
    cut = Cut((6, 4), slice(2, 5), slice(0, 4))
    weight = StoredWeight("m", Scaled(torch.int8, PerChannel()), cut, CPU)
    weight.load("weight", torch.ones(6, 4, dtype=torch.int8))
    weight.load("weight_scale", torch.arange(1.0, 7.0).reshape(shape))
    assert weight.dequantised().tolist() == [[row] * 4 for row in (3.0, 4.0, 5.0)]


def test_expressions_that_could_hold_a_start_are_refused() -> None:
    for hostile in (
        "(.+)+x",
        "(.|..){9}x",
        "(?x:(.+) +)x",
        "(.+)(?#)+x",
        ".?" * 5 + "x",
        "(.|..)" * 5 + "x",
        "x" * 600,
    ):
        with pytest.raises(ModelLoadError, match="too complex"):
            stated_expression(hostile)
    usual = stated_expression(r"model\.layers\.(1[0-9]|2[0-3])\.(?!mlp)[a-z_+*?()]+\.(q|k|v)_proj$")
    assert usual.fullmatch("model.layers.17.self_attn.k_proj")
    assert not usual.fullmatch("model.layers.27.self_attn.k_proj")


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    weights = quantise_folder(folder, {}, of_all(by_scale(FP8, None)))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    want = of_transformers(folder, weights)
    torch.testing.assert_close(logits(folder, SingleRank()), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="is quantised by modelopt; leave it out"):
        logits(folder, SingleRank(), quantization="fp8")


def test_what_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(TinyModel("gpt_neox", {}), tmp_path)
    with pytest.raises(ModelLoadError, match="served natively only"):
        load_model(
            EngineConfig(model=str(folder), quantization="fp8"), SingleRank(), CPU, torch.float32
        )
