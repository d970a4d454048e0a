"""FlashAttention-3 over a pool of latents: multi-head latent attention.

Absorbed (DeepSeek-V2, arXiv:2405.04434, section 2.1.2), over the pages: W_UK goes into
the query, so that a score is q_rope . k_rope + q_latent . latent, which the kernel computes from
`qv`, queries of the values; all heads share one KV head. Prompts are computed over the K and V of
heads where that costs less; rows that decode beside them stay absorbed. Knows its geometry and two
pools, no request.
"""

from __future__ import annotations

import torch

from attention.backends.base import LatentAttentionBackend
from attention.backends.flash_attention import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_metadata import (
    FlashAttentionMetadata,
    StepFacts,
    metadata_of,
)
from attention.backends.flash_attention_prompts import (
    PromptAttention,
    PromptRows,
    heads_pay,
    prompt_rows,
)
from attention.backends.flash_attention_steps import AccountTables, FlashAttentionSteps
from attention.backends.mixed_batches import cut_mixed_step, num_leading_decode_rows
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.providers import (
    FlashAttention3,
    load_flash_attention_3,
    load_triton_kernels,
    probe_flash_attention_3,
)
from attention.kernels.torch_latent import project_values
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_latent_backend

_ALL_KEYS = -1
_ONLY_ACCOUNT = 0  # layers with latents see every token
_KERNEL_CHOOSES_SPLITS = 0


@register_latent_backend("fa3")
class FlashAttentionLatentBackend(LatentAttentionBackend, FlashAttentionSteps):
    """fa3 for models that keep latents."""

    capability: BackendCapability = FlashAttentionBackend.capability

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_flash_attention_3()

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
        self._pool = token_to_kv_pool
        self._kernels = load_flash_attention_3()
        self._check(config, self._kernels)
        self._triton = load_triton_kernels()
        self._prompts = PromptAttention(self._kernels)
        self._metadata: FlashAttentionMetadata | None = None
        self._prompt_rows: PromptRows | None = None

    @classmethod
    def _check(cls, config: AttentionConfig, kernels: FlashAttention3) -> None:
        """Raise AttentionBackendError for what no kernel of the package covers."""
        if not kernels.takes_qv:
            raise AttentionBackendError(f"{kernels.package} has no queries of values (qv)")
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"fa3 reads latents of the model's dtype {config.dtype}, not {config.kv_dtype}"
            )
        dims = (config.head_dim, config.v_head_dim)
        if max(dims) > MAX_HEAD_DIM or any(dim % HEAD_DIM_MULTIPLE for dim in dims):
            raise AttentionBackendError(
                f"fa3 needs head dims that are multiples of {HEAD_DIM_MULTIPLE} up to "
                f"{MAX_HEAD_DIM}, this model has {dims}"
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode:
            return
        first_row = num_leading_decode_rows(forward_batch)
        if first_row < forward_batch.batch_size and heads_pay(
            self.config, forward_batch, first_row
        ):
            self._cut(forward_batch, first_row)

    def _cut(self, forward_batch: ForwardBatch, first_row: int) -> None:
        whole = self._step_metadata()
        self._metadata = cut_mixed_step(whole, first_row).decode
        self._prompt_rows = prompt_rows(
            self.config, self.req_to_token_pool, forward_batch, whole.cu_seqlens_q, first_row
        )

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        self._metadata = metadata_of(tables[_ONLY_ACCOUNT], facts, _ALL_KEYS)
        self._prompt_rows = None

    def _step_metadata(self) -> FlashAttentionMetadata:
        if self._metadata is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        return self._metadata

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Tokens of rows without any key (padding) come out as anything."""
        metadata, prompts = self._step_metadata(), self._prompt_rows
        if not tokens.is_saved:
            self._pool.set_latent(
                layer.layer_id, forward_batch.out_cache_loc, tokens.latent, tokens.k_rope
            )
        if tokens.q_nope.shape[0] == 0:
            return tokens.q_nope.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        if prompts is None:
            return self._attend_absorbed(tokens, up, layer, metadata)
        decoding, prompt_tokens = tokens.split(prompts.first_token)
        latents = self._pool.get_latent(layer.layer_id).flatten(0, 1)
        out = self._prompts.attend(prompt_tokens, up, layer, prompts, latents)
        if prompts.first_token == 0:
            return out
        return torch.cat((self._attend_absorbed(decoding, up, layer, metadata), out))

    def _attend_absorbed(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        metadata: FlashAttentionMetadata,
    ) -> torch.Tensor:
        q_latent = torch.bmm(tokens.q_nope.transpose(0, 1), up.w_uk).transpose(0, 1)
        pages = self._pool.get_latent(layer.layer_id)
        latents, k_rope = pages.tensor_split((layer.entry.latent_dim,), dim=-1)
        attended = self._kernels.attend(
            tokens.q_rope,
            k_rope.unsqueeze(2),
            latents.unsqueeze(2),
            qv=q_latent,
            cache_seqlens=metadata.cache_seqlens_int32,
            page_table=metadata.page_table,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seq_len_q,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=metadata.window_size,
            softcap=0.0,
            num_splits=_KERNEL_CHOOSES_SPLITS,
            scheduler_metadata=None,
        )
        return project_values(attended, up, tokens.q_nope.dtype)
