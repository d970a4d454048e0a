"""Experts that stay as a checkpoint stores them stand for what dequantised ones are, on one rank
and on two."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.quantised_checkpoints import FP8, by_scale, quantise_folder
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import MIXTURES, TinyModel, save_tiny_model
from tests.unit.workers.loading.test_quantised_experts import pair_of
from workers.config import EngineConfig
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.moe import experts as moe_experts
from workers.loading import loader
from workers.models import registry
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 2}


def experts_of(folder, tp, **changes):
    config = EngineConfig(model=str(folder), tp_size=tp.size, model_impl="native", **changes)
    with torch.inference_mode(mode=False):
        model = loader.load_model(config, tp, CPU, torch.float32).model
    return model.model.layers[-1].mlp.experts


def check_kept(monkeypatch, folder, kind, changes):
    monkeypatch.setattr(registry, "LlamaForCausalLM", CudaLlamaForCausalLM)

    def both(tp):
        return [
            experts_of(folder, tp, **changes, quantized_products=products)
            for products in ("dequantize", "native")
        ]

    def keeps(config, dtype, device):
        return config.quantized_products == "native"

    monkeypatch.setattr(loader, "keeps_formats_on", keeps)
    monkeypatch.setattr(moe_experts, "KEPT_DTYPES", (torch.float32,))
    ranks = ThreadRanks(2).run(both) if changes else [both(SingleRank())]
    for plain, kept in ranks:
        assert kept.is_kept
        assert kept.gate_up is None
        assert type(kept.kept.gate_up) is kind
        assert torch.equal(kept.kept.gate_up.dequantised(), plain.gate_up)
        assert torch.equal(kept.kept.down.dequantised(), plain.down)


@pytest.mark.parametrize("changes", [{"ep_size": 2}], ids=str)
def test_stacks_of_mxfp4(monkeypatch, tmp_path, changes) -> None:
    quantised, _ = pair_of("gpt_oss", tmp_path)
    check_kept(monkeypatch, quantised, Fp4Stack, changes)


@pytest.mark.parametrize("changes", [{}], ids=str)
def test_blocks_of_fp8(monkeypatch, tmp_path, changes) -> None:
    tiny = MIXTURES["qwen3_moe"]
    folder = save_tiny_model(TinyModel(tiny.model_type, {**tiny.changes, **WIDE}), tmp_path)
    others = ["self_attn", "layers.0.mlp"]
    recipe = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    blocks = by_scale(FP8, (128, 128), "weight_scale_inv")
    quantise_folder(
        folder,
        {**recipe, "modules_to_not_convert": others},
        lambda module: blocks if ".experts." in module else None,
    )
    check_kept(monkeypatch, folder, Fp8Stack, changes)
