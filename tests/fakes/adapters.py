"""Adapters of random numbers in PEFT's files, and models that have been merged with one by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.fakes.tiny_models import eager_reference

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = EVERY,
    **changes: Any,
) -> Path:
    """Of the model's layers whose names end with targets, as PEFT would save it. changes: of its
    config. A ranks entry in rank_pattern holds for its modules."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        is_text = not name.startswith("model.vision_tower")
        if leaf not in targets or not isinstance(module, torch.nn.Linear) or not is_text:
            continue
        own = changes.get("rank_pattern", {}).get(leaf, rank)
        prefix = f"base_model.model.{name}.lora_"
        for part, shape in (("A", (own, module.in_features)), ("B", (module.out_features, own))):
            noise = torch.randn(shape, generator=generator) * 0.12
            tensors[f"{prefix}{part}.weight"] = noise
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_reference(model_folder: Path, adapter_folder: Path) -> PreTrainedModel:
    """transformers' own model with W + scale * B A for every W that the adapter changes."""
    model = eager_reference(model_folder).eval()
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    tensors = load_file(adapter_folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")]
        leaf, rank = module.rpartition(".")[2], len(a)
        alpha = config.get("alpha_pattern", {}).get(leaf, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        model.get_submodule(module).weight.data += scale * (b @ a)
    return model


def greedy_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers continues the prompt with."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
