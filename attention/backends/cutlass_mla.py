"""cutlass_mla: CUTLASS's decode kernel over latents, of sglang-kernel, on data-centre Blackwell.

It reads pages of 128 tokens and 512 + 64 elements, for up to 128 heads. Its keys are not split,
as the package advises for graphs. Prefill, drafts and masks are Triton's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.backends.latent_decoders import BLACKWELL_LATENTS, LatentDecoder
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.kernels.blackwell import (
    CUTLASS_MLA_INSTALL,
    load_cutlass_mla,
    probe_cutlass_mla,
)
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend, register_latent_backend

PAGE_SIZE = 128
MAX_HEADS = 128


@register_attention_backend("cutlass_mla")
@register_latent_backend("cutlass_mla")
class CutlassMLABackend(LatentDecoder):
    """Raises AttentionBackendError for more heads a rank than the kernel has."""

    capability: BackendCapability = replace(
        BLACKWELL_LATENTS,
        name="cutlass_mla",
        page_sizes=(PAGE_SIZE,),
        default_page_size=PAGE_SIZE,
        install_hint=CUTLASS_MLA_INSTALL,
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_cutlass_mla()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        if config.tp_q_head_num > MAX_HEADS:
            raise AttentionBackendError(
                f"cutlass_mla has kernels for up to {MAX_HEADS} heads a rank, this model has "
                f"{config.tp_q_head_num}: more tensor parallelism divides them"
            )
        self._kernel = load_cutlass_mla()
        device = config.device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._page_table = torch.empty((0, 0), dtype=torch.int32, device=device)

    def _start_layers(self, metadata: FlashAttentionMetadata) -> None:
        self._page_table = metadata.page_table
        num_rows, width = metadata.page_table.shape
        size = self._kernel.workspace_bytes(width * PAGE_SIZE, num_rows)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self.config.device)

    def _decode(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        pages: torch.Tensor,
        scaling: float,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        return self._kernel.attend(
            q_nope=q,
            q_pe=q_rope,
            kv_c_and_k_pe_cache=pages,
            seq_lens=lengths,
            page_table=self._page_table,
            workspace=self._workspace,
            sm_scale=scaling,
        )
