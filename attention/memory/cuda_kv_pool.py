"""KV memory on a CUDA device: the layouts of token_to_kv_pool.py, written by one kernel a layer.

Knows no request and no free list.
"""

from __future__ import annotations

import torch

from attention.capability import AttentionBackendError
from attention.config import AttentionConfig
from attention.kernels.providers import load_triton_kernels
from attention.memory.token_to_kv_pool import MHATokenToKVPool


class CudaMHATokenToKVPool(MHATokenToKVPool):
    """K and V in the model's dtype; one launch writes both."""

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self._copy_kv = load_triton_kernels().copy_kv

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._copy_kv(k, v, *self.get_kv_buffer(layer_id), out_cache_loc)


class Fp8MHATokenToKVPool(MHATokenToKVPool):
    """K and V as float8_e4m3fn, with one scale a layer for each: what was written is value * scale.

    Half the bytes of bf16. kv_scales: float32 (num_layers, 2) on the device, K's and V's, 1 until
    set_scales; values beyond 448 * scale saturate.
    """

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        if config.kv_dtype != torch.float8_e4m3fn:
            raise AttentionBackendError(f"an fp8 pool holds float8_e4m3fn, not {config.kv_dtype}")
        super().__init__(config, num_pages)
        self._quantise_kv = load_triton_kernels().quantise_kv
        self.kv_scales = torch.ones(
            (config.num_layers, 2), dtype=torch.float32, device=config.device
        )

    def set_scales(self, layer_id: int, k_scale: float, v_scale: float) -> None:
        """Before anything is cached: what a checkpoint's calibration found for the layer."""
        if k_scale <= 0.0 or v_scale <= 0.0:
            raise ValueError(f"KV scales must be positive, got {k_scale} and {v_scale}")
        self.kv_scales[layer_id] = torch.tensor([k_scale, v_scale])

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pages = self.get_kv_buffer(layer_id)
        self._quantise_kv(k, v, *pages, out_cache_loc, self.kv_scales[layer_id])


def create_mha_pool(config: AttentionConfig, num_pages: int) -> MHATokenToKVPool:
    """The pool for config's device and kv_dtype.

    Raises AttentionBackendError when a CUDA device has no Triton.
    """
    if config.device.type != "cuda":
        return MHATokenToKVPool(config, num_pages)
    if config.kv_dtype == torch.float8_e4m3fn:
        return Fp8MHATokenToKVPool(config, num_pages)
    if config.kv_dtype == config.dtype:
        return CudaMHATokenToKVPool(config, num_pages)
    return MHATokenToKVPool(config, num_pages)
