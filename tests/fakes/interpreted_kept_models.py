"""Models with kept weights by Triton's interpreter: the logits of dequantised ones in plain torch,
on one rank and on two; within what rounding activations leaves where FP8 weights have them rounded.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.fakes.interpreted_carry import carry_into_exponents
from tests.fakes.interpreted_mixtures import PlainChooser
from tests.fakes.interpreted_threads import run_one_kernel_at_a_time
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.quantised_checkpoints import FP8, awq, by_scale, gptq, packed, quantise_folder
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import TinyModel, random_prompt, save_tiny_model
from tests.unit.workers.loading.test_quantised_experts import pair_of
from workers.config import EngineConfig
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.kept.int4 import Int4Groups
from workers.layers.moe import experts
from workers.layers.quantised import products, tile_table
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.skinny_shape import MmaTiles
from workers.loading import loader
from workers.models import cuda_stream, registry
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
MAX_ERROR = 2e-5
"""Of logits in float32, as a part of their norm: only sums are in another order."""
MAX_ERROR_ROUNDED = 0.15
"""The same where every product rounds its activations to E4M3's three bits."""
MAX_ERROR_RANKS = 0.02
"""Of two ranks beside one then: a sum in another order may be rounded to the other side."""
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
WIDE = TinyModel("llama", {**SIZES, "num_key_value_heads": 8})
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}
RECIPES = {
    "fp8 tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        by_scale(FP8, None),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        by_scale(FP8, (128, 128), "weight_scale_inv"),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, awq(64)),
    "gptq": ({**GPTQ, "desc_act": False}, gptq(64, has_act_order=False)),
    "gptq act-order": ({**GPTQ, "desc_act": True}, gptq(64, has_act_order=True)),
    "packed": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACKED}},
        },
        packed(64),
    ),
}


def logits_of(folder, tp, **changes):
    """A prompt of a few rows and a token behind it."""
    with torch.inference_mode(mode=False):
        config = EngineConfig(model=str(folder), tp_size=tp.size, **changes)
        loaded = loader.load_model(config, tp, CPU, torch.float32)
    layer = loaded.model.model.layers[-1]
    is_kept = isinstance(loaded.model, CudaLlamaForCausalLM)
    mixture = getattr(layer.mlp, "experts", None)
    assert (layer.self_attn.qkv_proj if mixture is None else mixture).is_kept is is_kept
    rows = ModelRows(loaded, torch_native_backend(loaded))
    return torch.cat([rows.step({0: random_prompt(5)})[0], rows.step({0: [5]})[0]])


def check_close(got, want, max_error):
    error = (got - want).norm() / want.norm()
    assert error < max_error, float(error)


def check_model(folder, max_error, max_error_ranks, **changes):
    """changes: of the two ranks."""
    registry.LlamaForCausalLM = LlamaForCausalLM
    loader.keeps_formats_on = lambda config, dtype, device: False
    want = logits_of(folder, SingleRank())
    registry.LlamaForCausalLM = CudaLlamaForCausalLM
    loader.keeps_formats_on = lambda config, dtype, device: True
    alone = logits_of(folder, SingleRank())
    together = ThreadRanks(2).run(lambda tp: logits_of(folder, tp, **changes))
    check_close(alone, want, max_error)
    for got in together:
        check_close(got, alone, max_error_ranks)


if __name__ == "__main__":
    torch.manual_seed(0)
    cuda_stream.GemmChooser = PlainChooser
    run_one_kernel_at_a_time()
    carry_into_exponents()
    # Of more rows than there are here.
    sys.modules["sgl_kernel"] = SimpleNamespace(fp8_blockwise_scaled_mm=None)
    # In 16 bits the interpreter rounds as no GPU does.
    Fp8Rows.dtypes = Fp8Blocks.dtypes = Int4Groups.dtypes = experts.KEPT_DTYPES = (torch.float32,)
    # Tensor core products of one row are of 16 bits alone.
    of_any_type = tuple(rule for rule in tile_table.INT4 if not isinstance(rule.tiles, MmaTiles))
    int4 = partial(Int4Product, table=of_any_type, gated_table=())
    products._PRODUCTS = {**products._PRODUCTS, Int4Groups: int4}
    for title, (recipe, quantiser) in RECIPES.items():
        with tempfile.TemporaryDirectory() as name:
            folder = save_tiny_model(WIDE, Path(name))
            quantise_folder(folder, recipe, lambda module, made=quantiser: made)
            if title.startswith("fp8"):
                check_model(folder, MAX_ERROR_ROUNDED, MAX_ERROR_RANKS)
            else:
                check_model(folder, MAX_ERROR, MAX_ERROR)
    with tempfile.TemporaryDirectory() as name:
        quantised, _ = pair_of("gpt_oss", Path(name))
        check_model(quantised, MAX_ERROR, MAX_ERROR, ep_size=2)
    print("all equal")
