"""FlashMLA over a pool of latents: decode steps. Everything else is FlashAttention-3's.

FlashMLA (DeepSeek, 2025) reads pages of 64 tokens and 512 + 64 elements, and splits rows over
multiprocessors by a plan that a step's first layer makes on the device. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_latent import FlashAttentionLatentBackend
from attention.backends.flash_attention_metadata import FlashAttentionMetadata, StepFacts
from attention.backends.flash_attention_steps import AccountTables
from attention.capability import BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.features import Feature
from attention.kernels.providers import FLASH_MLA_INSTALL, load_flash_mla, probe_flash_mla
from attention.kernels.torch_latent import project_values
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend, register_latent_backend

PAGE_SIZE = 64
PLAIN_LATENTS = "layers with latents see every token, plainly"
_FIRST_LAYER = 0


@dataclass(frozen=True, slots=True)
class RowPlan:
    """lengths: int32 (bs,), 1 for rows that pad a graph: the kernel expects a key in every row.
    tiles, num_splits: what get_mla_metadata gives for them."""

    lengths: torch.Tensor
    tiles: torch.Tensor
    num_splits: torch.Tensor


@register_attention_backend("flashmla")
@register_latent_backend("flashmla")
class FlashMLABackend(FlashAttentionLatentBackend):
    """FlashMLA on Hopper.

    The plan is made inside the first layer, so that a captured graph makes it anew from each
    replay's lengths.
    """

    capability: BackendCapability = replace(
        FlashAttentionBackend.capability,
        name="flashmla",
        page_sizes=(PAGE_SIZE,),
        default_page_size=PAGE_SIZE,
        install_hint=FLASH_MLA_INSTALL,
        latent_dims=range(512, 513),
        latent_rope_dims=range(64, 65),
        has_heads=False,
        has_sliding_window=False,
        has_logit_cap=False,
        has_sinks=False,
        has_bounded_accounts=False,
        why_not={
            **FlashAttentionBackend.capability.why_not,
            Feature.HEADS: "the kernel reads latents",
            Feature.CHUNKS: PLAIN_LATENTS,
            Feature.WINDOW: PLAIN_LATENTS,
            Feature.CAP: PLAIN_LATENTS,
            Feature.SINKS: PLAIN_LATENTS,
            Feature.BOUNDED_ACCOUNTS: PLAIN_LATENTS,
            Feature.FP8_KV: "latents are kept in the model's dtype",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_flash_mla()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._flash_mla = load_flash_mla()
        self._plan: RowPlan | None = None

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        super()._start_step(tables, facts)
        self._plan = None

    def _attend_absorbed(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        metadata: FlashAttentionMetadata,
    ) -> torch.Tensor:
        if metadata.max_seq_len_q > 1:
            return super()._attend_absorbed(tokens, up, layer, metadata)
        if layer.layer_id == _FIRST_LAYER or self._plan is None:
            self._plan = self._plan_rows(metadata, layer.tp_q_head_num)
        q_latent = torch.bmm(tokens.q_nope.transpose(0, 1), up.w_uk).transpose(0, 1)
        attended, _ = self._flash_mla.attend(
            q=torch.cat((q_latent, tokens.q_rope), dim=-1).unsqueeze(1),
            k_cache=self._pool.get_latent(layer.layer_id).unsqueeze(2),
            block_table=metadata.page_table,
            cache_seqlens=self._plan.lengths,
            head_dim_v=layer.entry.latent_dim,
            tile_scheduler_metadata=self._plan.tiles,
            num_splits=self._plan.num_splits,
            softmax_scale=layer.scaling,
            causal=True,
        )
        return project_values(attended.squeeze(1), up, tokens.q_nope.dtype)

    def _plan_rows(self, metadata: FlashAttentionMetadata, num_heads: int) -> RowPlan:
        """One query a row: as many of a latent's one head as there are heads."""
        lengths = metadata.cache_seqlens_int32.clamp(min=1)
        tiles, num_splits = self._flash_mla.plan(lengths, num_heads, 1)
        return RowPlan(lengths, tiles, num_splits)
