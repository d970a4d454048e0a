"""The Triton extend kernel over a pool of latents: multi-head latent attention, absorbed.

W_UK goes into the query, all heads share one head of latents, which are K and V at once, and what
comes out goes through W_UV (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Prompts too: that costs
a pair of query and key more than over the K and V of heads, and needs no memory for these. Knows
its geometry and two pools, no request.
"""

from __future__ import annotations

import torch

from attention.backends.base import LatentAttentionBackend
from attention.backends.flash_attention_metadata import (
    FlashAttentionMetadata,
    StepFacts,
    metadata_of,
)
from attention.backends.flash_attention_steps import AccountTables, FlashAttentionSteps
from attention.backends.triton_decoder import with_dense_heads
from attention.backends.triton_paged import TritonBackend
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gpu_limits import gpu_limits
from attention.kernels.paged_decode import ScoreRule
from attention.kernels.paged_extend import ExtendRows, PagedExtend, PagedKeys, SeenKeys
from attention.kernels.providers import load_triton_kernels, probe_triton
from attention.kernels.torch_latent import project_values
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_latent_backend

_ALL_KEYS = -1
_ONLY_ACCOUNT = 0  # layers with latents see every token


@register_latent_backend("triton")
class TritonLatentBackend(LatentAttentionBackend, FlashAttentionSteps):
    """triton for models that keep latents."""

    capability: BackendCapability = TritonBackend.capability

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_triton()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            name = type(token_to_kv_pool).__name__
            raise AttentionBackendError(f"latent attention reads a LatentTokenToKVPool, not {name}")
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{self.capability.name} reads latents of the model's dtype {config.dtype}, "
                f"not {config.kv_dtype}"
            )
        self._pool = token_to_kv_pool
        self._triton = load_triton_kernels()
        geometry = ExtendGeometry(
            kv_heads=1,
            group=config.tp_q_head_num,
            head_dim=token_to_kv_pool.entry.latent_dim,
            v_head_dim=token_to_kv_pool.entry.latent_dim,
            page_size=token_to_kv_pool.page_size,
            element_bytes=config.dtype.itemsize,
            rope_dim=token_to_kv_pool.entry.rope_dim,
        )
        try:
            self._extend = PagedExtend(geometry, gpu_limits(config.device))
        except ValueError as error:
            raise AttentionBackendError(f"{self.capability.name}: {error}") from error
        self._metadata: FlashAttentionMetadata | None = None

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        self._metadata = metadata_of(tables[_ONLY_ACCOUNT], facts, _ALL_KEYS)

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Tokens of rows without any key (padding) come out as zeros."""
        if not tokens.is_saved:
            self._pool.set_latent(
                layer.layer_id, forward_batch.out_cache_loc, tokens.latent, tokens.k_rope
            )
        q = torch.bmm(tokens.q_nope.transpose(0, 1), up.w_uk).transpose(0, 1).contiguous()
        attended = self._attend(q, with_dense_heads(tokens.q_rope), layer, forward_batch)
        return project_values(attended, up, tokens.q_nope.dtype)

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """q (num_tokens, tp_q_head_num, latent_dim), q_rope (num_tokens, tp_q_head_num, rope_dim),
        their heads dense -> as q."""
        metadata = self._step_metadata()
        attended = torch.empty_like(q)
        latents = self._pool.get_latent(layer.layer_id)
        rows = ExtendRows(
            metadata.cu_seqlens_q,
            metadata.cache_seqlens_int32,
            metadata.page_table,
            metadata.max_seq_len_q,
            metadata.max_seq_len_k,
        )
        seen = SeenKeys(forward_batch.visibility, _ALL_KEYS, forward_batch.positions)
        rule = ScoreRule(layer.scaling, 0.0, None)
        self._extend.attend(q, PagedKeys(latents, latents), rows, seen, rule, attended, q_rope)
        return attended

    def _step_metadata(self) -> FlashAttentionMetadata:
        if self._metadata is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        return self._metadata
