"""Backends over latents that decode with kernels of Blackwell's, and take Triton's for the rest.

What the kernels are given follows their packages' source (sglang-kernel 0.4.3, flashinfer 0.6.12)
and is held to it by stand-ins in tests; nothing here has run on such a GPU. Knows its geometry and
two pools, no request.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from attention.backends.flash_attention_metadata import FlashAttentionMetadata, StepFacts
from attention.backends.flash_attention_steps import AccountTables
from attention.backends.flash_mla import PLAIN_LATENTS
from attention.backends.triton_latent import TritonLatentBackend
from attention.backends.triton_paged import TritonBackend
from attention.capability import BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import ForwardBatch
from attention.latent_inputs import LatentLayer
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool

BLACKWELL_LATENTS: BackendCapability = replace(
    TritonBackend.capability,
    name="latents on Blackwell",
    min_compute_capability=(10, 0),
    max_compute_capability=(10, 3),
    has_heads=False,
    has_sliding_window=False,
    has_logit_cap=False,
    has_sinks=False,
    has_bounded_accounts=False,
    latent_dims=range(512, 513),
    latent_rope_dims=range(64, 65),
    why_not={
        **TritonBackend.capability.why_not,
        Feature.HEADS: "the kernel reads latents",
        Feature.CHUNKS: PLAIN_LATENTS,
        Feature.WINDOW: PLAIN_LATENTS,
        Feature.CAP: PLAIN_LATENTS,
        Feature.SINKS: PLAIN_LATENTS,
        Feature.BOUNDED_ACCOUNTS: PLAIN_LATENTS,
        Feature.FP8_KV: "latents are kept in the model's dtype",
    },
)
"""What such backends have in common, but for their names, packages and page sizes."""

_FIRST_LAYER = 0


class LatentDecoder(TritonLatentBackend):
    """Decode steps are _decode's.

    What a step's layers share beside the tables is made inside its first layer, so that a captured
    graph makes it anew from each replay's lengths and owns its memory.
    """

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._lengths: torch.Tensor | None = None

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        super()._start_step(tables, facts)
        self._lengths = None

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        metadata = self._step_metadata()
        if not (forward_batch.forward_mode.is_decode and metadata.batch_size):
            return super()._attend(q, q_rope, layer, forward_batch)
        lengths = self._lengths
        if layer.layer_id == _FIRST_LAYER or lengths is None:
            # Rows that pad a graph have a key, of the dummy page: the kernels expect one.
            lengths = self._lengths = metadata.cache_seqlens_int32.clamp(min=1)
            self._start_layers(metadata)
        pages = self._pool.get_latent(layer.layer_id)
        return self._decode(q, q_rope, pages, layer.scaling, lengths)

    @abstractmethod
    def _start_layers(self, metadata: FlashAttentionMetadata) -> None:
        """The step's first layer begins."""

    @abstractmethod
    def _decode(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        pages: torch.Tensor,
        scaling: float,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """q (bs, heads, latent_dim), q_rope (bs, heads, rope_dim), pages (num_pages, page_size,
        latent_dim + rope_dim), lengths int32 (bs,) -> as q."""
