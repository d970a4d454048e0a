"""Whether layers keep weights as a checkpoint stores them: one rule for loads and for surveys."""

import torch

from workers.config import EngineConfig
from workers.layers.moe.products import KERNEL_DTYPES

FIRST_WITH_PRODUCTS = (9, 0)
"""Compute capability from which on there are products with quantised weights."""


def keeps_formats_on(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """As keeps_formats, on a device that is there."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return keeps_formats(config, dtype, capability)


def keeps_formats(
    config: EngineConfig, dtype: torch.dtype, compute_capability: tuple[int, int] | None
) -> bool:
    """Whether products are made with weights as they are stored: by kernels that give no row the
    same bits whatever their number. compute_capability: None where there is no NVIDIA GPU."""
    if config.quantized_products == "dequantize" or config.deterministic:
        return False
    if compute_capability is None or dtype not in KERNEL_DTYPES:
        return False
    return compute_capability >= FIRST_WITH_PRODUCTS
