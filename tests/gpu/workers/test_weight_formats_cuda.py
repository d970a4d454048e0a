"""Weights stored in formats are on the device, bit by bit, what they are on the host."""

import pytest
import torch

from tests.fakes.quantised_checkpoints import FP8, awq, by_scale, quantise_folder
from tests.fakes.tiny_models import MIXTURES, NATIVE, TinyModel, save_tiny_model
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU
from workers.config import EngineConfig
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank

pytestmark = NEEDS_GPU

CPU = torch.device("cpu")
EXPERTS = MIXTURES["qwen2_moe"]
WIDE = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}


def assert_alike(folder, **changes) -> None:
    config = EngineConfig(
        model=str(folder), model_impl="native", quantized_products="dequantize", **changes
    )
    on_host = load_model(config, SingleRank(), CPU, torch.bfloat16).model
    on_device = load_model(config, SingleRank(), CUDA, torch.bfloat16).model
    for (key, ours), theirs in zip(on_device.named_parameters(), on_host.parameters(), strict=True):
        assert ours.device.type == CUDA.type, key
        assert torch.equal(ours.cpu(), theirs), key


def test_experts_in_blocks_of_fp8(tmp_path) -> None:
    tiny = TinyModel(EXPERTS.model_type, {**EXPERTS.changes, **WIDE})
    folder = save_tiny_model(tiny, tmp_path)
    recipe = {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}
    blocks = by_scale(FP8, (16, 32), "weight_scale_inv")
    quantise_folder(folder, recipe, lambda module: blocks)
    assert_alike(folder)


def test_integers_of_four_bits(tmp_path) -> None:
    folder = save_tiny_model(TinyModel("llama", {"intermediate_size": 128}), tmp_path)
    recipe = {"quant_method": "awq", "bits": 4, "group_size": 32}
    quantise_folder(folder, recipe, lambda module: awq(32))
    assert_alike(folder)


def test_weights_rounded_while_loading(tmp_path) -> None:
    assert_alike(save_tiny_model(NATIVE["llama_biased"], tmp_path), quantization="fp8")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_dummies_are_alike_at_every_load(tmp_path, quantization) -> None:
    folder = save_tiny_model(NATIVE["qwen3"], tmp_path)
    config = EngineConfig(model=str(folder), load_format="dummy", quantization=quantization)
    first, second = (load_model(config, SingleRank(), CUDA, torch.bfloat16).model for _ in range(2))
    theirs = second.state_dict()
    for key, ours in first.state_dict().items():
        same = (x.reshape(-1).view(torch.uint8) for x in (ours, theirs.pop(key)))
        assert torch.equal(*same), key
        assert ours.float().isfinite().all(), key
    assert not theirs
