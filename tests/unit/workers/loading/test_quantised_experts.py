"""Quantised experts: their dequantised model's logits, on one rank, cut and divided over ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import ModelRows
from tests.fakes.quantised_checkpoints import FP8, by_scale, mxfp4, quantise_folder
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import MIXTURES, TinyModel, random_prompt, save_tiny_model
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.stacks import StackCut
from workers.loading.loader import load_model
from workers.models.features import ModelFeature
from workers.parallel.group import SingleRank, TPGroup

CPU = torch.device("cpu")
PROMPT = random_prompt(12)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}
STACKS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
WIDE = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_key_value_heads": 4}
WIDE |= {"shared_expert_intermediate_size": 128}


def logits_of(folder: Path, tp: TPGroup | None = None, **changes: Any) -> torch.Tensor:
    config = EngineConfig(model=str(folder), **changes)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp or SingleRank(), CPU, torch.float32)
    return ModelRows(loaded, DenseAttention()).step({0: PROMPT})[0]


def quantise_stacks(folder: Path) -> dict[str, torch.Tensor]:
    """gpt-oss's experts in blocks and scales. The tensors of the same model unquantised."""
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        made = [mxfp4(matrix.t().contiguous()) for matrix in stored.pop(name)]
        blocks = torch.stack([one.tensors["weight_packed"] for one in made])
        stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = torch.stack([one.tensors["weight_scale"] for one in made])
        stored[f"{name}/plain"] = torch.stack([one.matrix.t() for one in made])
    plain = {name: tensor for name, tensor in stored.items() if "_blocks" not in name}
    plain = {
        name.removesuffix("/plain"): tensor.contiguous()
        for name, tensor in plain.items()
        if "_scales" not in name
    }
    packed = {name: tensor for name, tensor in stored.items() if "/plain" not in name}
    save_file(packed, folder / "model.safetensors")
    return plain


def pair_of(name: str, folder: Path) -> tuple[Path, Path]:
    """(quantised, the same unquantised)."""
    tiny = MIXTURES[name]
    plain = save_tiny_model(TinyModel(tiny.model_type, {**tiny.changes, **WIDE}), folder / "plain")
    quantised = save_tiny_model(
        TinyModel(tiny.model_type, {**tiny.changes, **WIDE}), folder / "quantised"
    )
    if name == "gpt_oss":
        reference = quantise_stacks(quantised)
        quantise_folder(quantised, STACKS, lambda module: None)
    else:
        reference = quantise_folder(
            quantised, BLOCKS, lambda module: by_scale(FP8, (16, 32), "weight_scale_inv")
        )
    save_file(reference, plain / "model.safetensors")
    return quantised, plain


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
@serves(ModelFeature.QUANTISED, ModelFeature.TENSOR_PARALLEL, ModelFeature.EXPERT_PARALLEL)
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised, plain = pair_of(name, tmp_path)
    want = logits_of(plain)
    torch.testing.assert_close(logits_of(quantised), want, rtol=0, atol=1e-5)
    for ep_size in (1, 2):
        together = ThreadRanks(2).run(
            lambda tp, ep_size=ep_size: logits_of(quantised, tp, tp_size=2, ep_size=ep_size)
        )
        torch.testing.assert_close(together[1], want, rtol=0, atol=2e-5)
    assert torch.isfinite(logits_of(quantised, load_format="dummy")).all()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    quantised, _ = pair_of("gpt_oss", tmp_path)
    with pytest.raises(ConfigError, match="inside of groups of 32"):
        ThreadRanks(4).run(lambda tp: logits_of(quantised, tp, tp_size=4))
    path = quantised / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name].float()}, path)
    with pytest.raises(ModelLoadError, match=r"down_proj_scales has dtype torch\.float32, mxfp4"):
        logits_of(quantised)


def test_stacks_are_whole_groups_wide() -> None:
    with pytest.raises(ConfigError, match="48 columns are no whole groups of 32"):
        StackCut((2, 64, 48), slice(0, 2), slice(0, 64), slice(0, 48))
