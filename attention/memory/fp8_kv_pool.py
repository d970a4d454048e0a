"""K and V as scaled float8_e4m3fn in the layout of token_to_kv_pool.py, in plain torch.

Runs on every device. Knows no request and no checkpoint: whoever loads one hands the scales over.
"""

from __future__ import annotations

import torch

from attention.capability import AttentionBackendError
from attention.config import AttentionConfig
from attention.memory.token_to_kv_pool import MHATokenToKVPool

E4M3_MAX = 448.0


class Fp8MHATokenToKVPool(MHATokenToKVPool):
    """K and V as float8_e4m3fn, with one scale a layer for each: what was written is value * scale.

    Half the bytes of bf16. kv_scales: float32 (num_layers, 2) on the device, K's and V's, 1 until
    set_scales; values beyond 448 * scale saturate. host_scales: the same of each layer, for kernels
    that take numbers.
    """

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        if config.kv_dtype != torch.float8_e4m3fn:
            raise AttentionBackendError(f"an fp8 pool holds float8_e4m3fn, not {config.kv_dtype}")
        super().__init__(config, num_pages)
        self.kv_scales = torch.ones(
            (config.num_layers, 2), dtype=torch.float32, device=config.device
        )
        self.host_scales = [(1.0, 1.0)] * config.num_layers

    def set_scales(self, layer_id: int, k_scale: float, v_scale: float) -> None:
        """Before anything is cached: what a checkpoint's calibration found for the layer."""
        if k_scale <= 0.0 or v_scale <= 0.0:
            raise ValueError(f"KV scales must be positive, got {k_scale} and {v_scale}")
        self.kv_scales[layer_id] = torch.tensor([k_scale, v_scale])
        self.host_scales[layer_id] = (k_scale, v_scale)

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        buffers, scales = self.get_kv_buffer(layer_id), self.kv_scales[layer_id]
        for buffer, new, scale in zip(buffers, (k, v), scales, strict=True):
            scaled = (new.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            # As bytes: torch indexes float8 on no device.
            tokens = buffer.view(torch.uint8).view(-1, *buffer.shape[2:])
            tokens.index_copy_(0, out_cache_loc, scaled.view(torch.uint8))

    def gather_tokens(
        self, layer_id: int, cache_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (n, heads, head_dim) and V (n, heads, v_head_dim) of n tokens in float32, scaled back.

        cache_indices: int32 or int64 (n,).
        """
        k, v = self.get_kv_buffer(layer_id)
        return self._gather(layer_id, (k.flatten(0, 1), v.flatten(0, 1)), cache_indices)

    def gather_heads(
        self, layer_id: int, head_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (n, head_dim) and V (n, v_head_dim) of n single heads in float32, scaled back.

        head_indices: int32 or int64 (n,), cache index * heads + head.
        """
        k, v = self.get_kv_buffer(layer_id)
        return self._gather(layer_id, (k.flatten(0, 2), v.flatten(0, 2)), head_indices)

    def _gather(
        self, layer_id: int, kv: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (
            buffer.view(torch.uint8).index_select(0, rows).view(torch.float8_e4m3fn).float()
            for buffer in kv
        )
        k_scale, v_scale = self.kv_scales[layer_id]
        return k.mul_(k_scale), v.mul_(v_scale)
