"""What the slots of adapters take of a model without memory."""

import torch
from torch import nn

from workers.adapters.banks import Banks
from workers.adapters.sites import AdapterTargets, sites_of
from workers.config import EngineConfig


def adapter_banks(
    config: EngineConfig, model: nn.Module, architecture: str, dtype: torch.dtype
) -> Banks | None:
    """model: a rank's, on the meta device, its formats settled. None where adapters are not served.
    Raises ConfigError as a start does."""
    if not config.max_loras:
        return None
    targets = AdapterTargets(config.lora_embeddings, config.lora_experts)
    sites = sites_of(model, architecture, targets)
    banks = Banks.of(sites, config.max_loras, config.max_lora_rank, dtype, torch.device("meta"))
    if config.device == "cuda":
        banks.check_on_gpu(config.tp_size)
    return banks
