"""trtllm_mla: TensorRT-LLM's decode kernel over latents, by way of flashinfer, on Blackwell.

It reads pages of 32 or 64 tokens; a page table's rows hold a multiple of 128 tokens, and what they
return is bfloat16. Prefill, drafts and masks are Triton's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.backends.latent_decoders import BLACKWELL_LATENTS, LatentDecoder
from attention.capability import BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.kernels.blackwell import (
    TRTLLM_INSTALL,
    load_trtllm_mla,
    probe_trtllm_mla,
)
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend, register_latent_backend

PAGE_SIZES = (32, 64)
ROW_TOKENS = 128
WORKSPACE_BYTES = 150 << 20
_KERNELS = "trtllm-gen"


@register_attention_backend("trtllm_mla")
@register_latent_backend("trtllm_mla")
class TRTLLMMLABackend(LatentDecoder):
    """One workspace, zeroed once: the kernel counts in it and leaves its counters at zero."""

    capability: BackendCapability = replace(
        BLACKWELL_LATENTS,
        name="trtllm_mla",
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.bfloat16,),
        page_sizes=PAGE_SIZES,
        default_page_size=PAGE_SIZES[-1],
        install_hint=TRTLLM_INSTALL,
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_trtllm_mla()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._kernel = load_trtllm_mla()
        device = config.device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._page_table = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._max_seq_len = 0

    def _start_layers(self, metadata: FlashAttentionMetadata) -> None:
        page_table = metadata.page_table
        missing = -page_table.shape[1] % (ROW_TOKENS // self._pool.page_size)
        self._page_table = pad(page_table, (0, missing)) if missing else page_table
        self._max_seq_len = metadata.max_seq_len_k

    def _decode(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        pages: torch.Tensor,
        scaling: float,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        entry = self._pool.entry
        attended = self._kernel(
            query=torch.cat((q, q_rope), dim=-1).unsqueeze(1),
            kv_cache=pages,
            workspace_buffer=self._workspace,
            qk_nope_head_dim=self.config.head_dim - entry.rope_dim,
            kv_lora_rank=entry.latent_dim,
            qk_rope_head_dim=entry.rope_dim,
            block_tables=self._page_table,
            seq_lens=lengths,
            max_seq_len=self._max_seq_len,
            bmm1_scale=scaling,
            backend=_KERNELS,
        )
        return attended.squeeze(1)
