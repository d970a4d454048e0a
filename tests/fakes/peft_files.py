"""Adapters' files of ones, and an engine's word on what it takes."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from workers.adapters.expert_modules import ExpertModules
from workers.adapters.folder import adapter_at
from workers.adapters.ref import AdapterInfo
from workers.errors import AdapterError

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
EMBEDDING = "model.embed_tokens"
EXPERTS = ExpertModules(
    path="model.layers.0.moe.experts",
    stack_path="model.layers.0.mlp.experts",
    gate="w1",
    up="w3",
    down="w2",
    num_experts=4,
    hidden_size=6,
    width=3,
    in_turns=False,
    inputs_first=False,
)
MODULES = {Q: (6, 10), DOWN: (12, 6), EMBEDDING: (9, 5)}
INFO = AdapterInfo(max_rank=8, num_slots=2, modules=MODULES, experts=(EXPERTS,))
ONE = torch.ones((1, 1))
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}


def name_of(module, part):
    return f"base_model.model.{module}.lora_{part}.weight"


def pair(module=Q, rank=2, dtype=torch.float32):
    in_features, out_features = INFO.modules[module]
    return {
        name_of(module, "A"): torch.ones((rank, in_features), dtype=dtype),
        name_of(module, "B"): torch.ones((out_features, rank), dtype=dtype),
    }


def embedding(module, size=9):
    prefix = f"base_model.model.{module}.lora_embedding_"
    return {f"{prefix}A": torch.ones((2, size)), f"{prefix}B": torch.ones((5, 2))}


def pair_of(module, inputs=9, outputs=5):
    shapes = (2, inputs), (outputs, 2)
    return {name_of(module, x): torch.ones(shape) for x, shape in zip("AB", shapes, strict=True)}


def expert_pair(part, expert="0"):
    inputs, outputs = (3, 6) if part == "w2" else (6, 3)
    return pair_of(f"model.layers.0.moe.experts.{expert}.{part}", inputs, outputs)


def stack(a_shape, b_shape, layer=0, inner=False):
    experts = f"model.layers.{layer}.mlp.experts{'.base_layer' if inner else ''}"
    return {
        name_of(experts, "A"): torch.ones(a_shape),
        name_of(experts, "B"): torch.ones(b_shape),
    }


def write(folder, tensors, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "adapter_model.safetensors")


def refused(folder, message):
    with pytest.raises(AdapterError, match=re.escape(message)) as error:
        adapter_at("one", folder, INFO)
    assert str(folder) not in str(error.value)
