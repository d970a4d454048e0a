"""Latents instead of K and V: what multi-head latent attention keeps of a token (LatentEntry).

One vector a token and layer, shared by all heads: the compressed latent first, then the rotated
part of the key, the order in which FlashMLA and FlashAttention-3 read it. Knows no up-projection.
"""

from __future__ import annotations

import torch

from attention.capability import AttentionBackendError
from attention.config import AttentionConfig
from attention.memory.layout import LatentEntry
from attention.memory.token_to_kv_pool import TokenToKVPool, zeroed_pages


class LatentTokenToKVPool(TokenToKVPool):
    """One buffer (layers, num_pages, page_size, latent_dim + rope_dim), zeroed.

    Every rank holds the whole latent: heads are cut over ranks, a latent belongs to all of them.
    Raises AttentionBackendError for a config without latents or with an FP8 pool.
    """

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.entry = _entry_of(config)
        if config.kv_dtype.itemsize == 1:
            raise AttentionBackendError(f"latents are not kept in {config.kv_dtype}")
        shape = (config.num_layers, num_pages, config.page_size, self.entry.elements_per_token)
        self._latents = zeroed_pages(shape, config.kv_dtype, config.device)

    @staticmethod
    def bytes_per_page(config: AttentionConfig) -> int:
        return config.kv_bytes_per_token * config.page_size

    @property
    def num_bytes(self) -> int:
        return self._latents.numel() * self._latents.itemsize

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._latents,)

    def get_latent(self, layer_id: int) -> torch.Tensor:
        """(num_pages, page_size, latent_dim + rope_dim) of one layer, a view."""
        return self._latents[layer_id]

    def set_latent(
        self,
        layer_id: int,
        out_cache_loc: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
    ) -> None:
        """Write n tokens of one layer at out_cache_loc int64 (n,), converted to the pool's dtype.

        latent: (n, latent_dim); k_rope: (n, rope_dim), rotated. Where several tokens name the same
        index any one of them stays.
        """
        tokens = self._latents[layer_id].flatten(0, 1)
        joined = torch.cat((latent, k_rope), dim=-1)
        tokens.index_copy_(0, out_cache_loc, joined.to(tokens.dtype))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises AttentionBackendError: no head's K and V are kept."""
        raise AttentionBackendError("the KV pool holds latents: it has no K and V of heads")

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Raises AttentionBackendError, as get_kv_buffer."""
        raise AttentionBackendError("the KV pool holds latents: it takes no K and V of heads")

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        self._latents.flatten(1, 2).index_fill_(1, cache_indices, 0)


def _entry_of(config: AttentionConfig) -> LatentEntry:
    if config.latent is None:
        raise AttentionBackendError("the model keeps K and V of heads, no latents")
    return config.latent
