"""KV memory on a CUDA device: the layouts of token_to_kv_pool.py, written by one kernel a layer.

Knows no request and no free list.
"""

from __future__ import annotations

import torch

from attention.config import AttentionConfig
from attention.kernels.providers import load_triton_kernels
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
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


class CudaFp8MHATokenToKVPool(Fp8MHATokenToKVPool):
    """Fp8MHATokenToKVPool; one launch scales, rounds and writes both."""

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self._quantise_kv = load_triton_kernels().quantise_kv

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pages = self.get_kv_buffer(layer_id)
        self._quantise_kv(k, v, *pages, out_cache_loc, self.kv_scales[layer_id])


def create_mha_pool(config: AttentionConfig, num_pages: int) -> MHATokenToKVPool:
    """The pool for config's device and kv_dtype.

    Raises AttentionBackendError when a CUDA device has no Triton.
    """
    is_cuda = config.device.type == "cuda"
    if config.kv_dtype == torch.float8_e4m3fn:
        return (CudaFp8MHATokenToKVPool if is_cuda else Fp8MHATokenToKVPool)(config, num_pages)
    if is_cuda and config.kv_dtype == config.dtype:
        return CudaMHATokenToKVPool(config, num_pages)
    return MHATokenToKVPool(config, num_pages)
