"""KV memory on a CUDA device: the layouts of token_to_kv_pool.py, written by one kernel a layer.

Knows no request and no free list.
"""

from __future__ import annotations

import torch

from attention.capability import ComputeCapability
from attention.config import AttentionConfig
from attention.kernels.providers import load_triton_kernels
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool

_FIRST_WITH_E4M3 = (8, 9)


class LinesUpByKernel(MHATokenToKVPool):
    """One launch for K and one for V, of what moves alone."""

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self._line_up = load_triton_kernels().line_up

    def line_up(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        starts: torch.Tensor,
        num_kept: torch.Tensor,
    ) -> None:
        for tokens in self.stored():
            self._line_up(tokens, sources, targets, starts, num_kept)


class CudaMHATokenToKVPool(LinesUpByKernel):
    """K and V in the model's dtype; one launch writes both."""

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self._copy_kv = load_triton_kernels().copy_kv

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._copy_kv(k, v, *self.get_kv_buffer(layer_id), out_cache_loc)


class CudaFp8MHATokenToKVPool(LinesUpByKernel, Fp8MHATokenToKVPool):
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
    capability = torch.cuda.get_device_capability(config.device) if is_cuda else None
    return mha_pool_class(config, capability)(config, num_pages)


def mha_pool_class(
    config: AttentionConfig, capability: ComputeCapability | None
) -> type[MHATokenToKVPool]:
    """capability: of config's device, None without CUDA. Triton writes e4m3 from sm89 on; before,
    torch does."""
    if config.kv_dtype == torch.float8_e4m3fn:
        has_e4m3 = capability is not None and capability >= _FIRST_WITH_E4M3
        return CudaFp8MHATokenToKVPool if has_e4m3 else Fp8MHATokenToKVPool
    if capability is not None and config.kv_dtype == config.dtype:
        return CudaMHATokenToKVPool
    return MHATokenToKVPool
