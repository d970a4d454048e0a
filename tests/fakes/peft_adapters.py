"""Adapters of random numbers as PEFT itself saves them, and PEFT's model with one."""

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.fakes.tiny_models import eager_reference

EXPERT_TENSORS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def save_peft_adapter(folder: Path, model_folder: Path, size: float = 0.12, **config) -> PeftModel:
    """size: of its numbers. config: of LoraConfig. The model that it is of computes with it."""
    stated = LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, **{"r": 4, **config})
    with warnings.catch_warnings():
        # Of tied weights, and of the embedding that is saved, too.
        warnings.simplefilter("ignore")
        model = get_peft_model(eager_reference(model_folder), stated).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * size
        model.save_pretrained(folder)
    return model
