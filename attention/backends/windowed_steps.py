"""Backends whose layers differ in windows: the rows of the step and the account of a layer."""

from __future__ import annotations

import torch

from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.backends.flash_attention_steps import FlashAttentionSteps
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool


class WindowedSteps(FlashAttentionSteps):
    """_metadata: of the step under way, by window, -1 being all; whoever starts it fills it in."""

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._accounts = _accounts_by_window(config)
        self._metadata: dict[int, FlashAttentionMetadata] = {}

    def _step_metadata(self, layer: AttentionLayer) -> FlashAttentionMetadata:
        if not self._metadata:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        metadata = self._metadata.get(layer.sliding_window_size)
        if metadata is None:
            raise ValueError(
                f"layer {layer.layer_id} has sliding_window_size={layer.sliding_window_size}, "
                f"the config knows {sorted(self._metadata)}"
            )
        return metadata

    def _save(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache:
            places = self._places(layer, forward_batch)
            self.token_to_kv_pool.set_kv_buffer(layer.layer_id, places, k, v)

    def _places(self, layer: AttentionLayer, forward_batch: ForwardBatch) -> torch.Tensor:
        """Where the new tokens' K and V go, of the layer's account."""
        return forward_batch.cache_locs(self._accounts[layer.sliding_window_size])


def _accounts_by_window(config: AttentionConfig) -> dict[int, int]:
    """Of layers without chunks: which account has a window's tokens, -1 being all."""
    return {
        layer.sliding_window_size: config.account_of(layer_id)
        for layer_id, layer in enumerate(config.layers)
        if layer.chunk_size <= 0 and not layer.max_encoder_tokens
    }
