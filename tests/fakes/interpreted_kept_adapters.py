"""Adapters over weights kept as they are stored, by Triton's interpreter, against the dequantised
model with the same adapters on CPU.

Run as a module: Triton interprets kernels if told so before they are defined.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from tests.fakes.interpreted_adapters import (
    ADAPTER_OF_ROW,
    Dressed,
    EagerSide,
    Hooked,
    filled_banks,
)
from tests.fakes.interpreted_kept_models import RECIPES, WIDE, check_close
from tests.fakes.interpreted_mixtures import PlainChooser
from tests.fakes.interpreted_threads import run_one_kernel_at_a_time
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.quantised_checkpoints import quantise_folder
from tests.fakes.tiny_models import random_prompt, save_tiny_model
from workers.adapters.adapted_products import AdapterWays
from workers.adapters.added_beside import AddedBeside
from workers.adapters.dressed import DressedModel
from workers.adapters.worn import WornAdapters
from workers.config import EngineConfig
from workers.layers.kept.int4 import Int4Groups
from workers.layers.quantised import products, tile_table
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.skinny_shape import MmaTiles
from workers.loading import loader
from workers.models import cuda_stream, registry
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")


def logits_of(folder, model_class, dress):
    registry.LlamaForCausalLM = model_class
    is_fused = model_class is CudaLlamaForCausalLM
    loader.keeps_formats_on = lambda config, dtype, device: is_fused
    loaded = loader.load_model(EngineConfig(model=str(folder)), SingleRank(), CPU, torch.float32)
    assert loaded.model.model.layers[0].self_attn.qkv_proj.is_kept is is_fused
    model = dress(loaded.model, filled_banks(loaded.model, loaded.facts.architecture))
    rows = ModelRows(loaded, torch_native_backend(loaded))
    rows.model = model
    prompts = [random_prompt(5, seed=seed) for seed in range(3)]
    steps = [dict(enumerate(prompts)), {0: [5], 1: [6], 2: [7]}]
    return torch.cat([row for step in steps for row in rows.step(step).values()])


def hooked(model, banks):
    worn = WornAdapters()
    for bank in banks.all():
        bank.hook(worn, SingleRank())
    return Hooked(model, worn)


def dressed(model, banks):
    beside = partial(AddedBeside, side=EagerSide())
    return Dressed(model, DressedModel(model, banks, ADAPTER_OF_ROW, AdapterWays(beside, beside)))


if __name__ == "__main__":
    torch.manual_seed(0)
    cuda_stream.GemmChooser = PlainChooser
    run_one_kernel_at_a_time()
    Int4Groups.dtypes = (torch.float32,)
    # Tensor core products of one row are of 16 bits alone.
    of_any_type = tuple(rule for rule in tile_table.INT4 if not isinstance(rule.tiles, MmaTiles))
    int4 = partial(Int4Product, table=of_any_type, gated_table=())
    products._PRODUCTS = {**products._PRODUCTS, Int4Groups: int4}
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_model(WIDE, Path(name))
        recipe, quantiser = RECIPES["gptq"]
        quantise_folder(folder, recipe, lambda module: quantiser)
        plain = logits_of(folder, LlamaForCausalLM, hooked)
        check_close(logits_of(folder, CudaLlamaForCausalLM, dressed), plain, 2e-5)
    print("all equal")
