"""trtllm_mha: TensorRT-LLM's decode kernels over K and V of heads, by way of flashinfer.

On data-centre Blackwell; the package's XQA kernels for other GPUs, which are compiled at first use,
are not taken. What the kernel is given follows flashinfer 0.6.12's source and is held to it by a
stand-in in tests; nothing here has run on such a GPU. Prefill, drafts and masks are Triton's. Knows
its geometry and two pools, no request.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.triton_decoder import TritonDecoder, with_dense_heads
from attention.backends.triton_paged import TritonBackend
from attention.capability import BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.blackwell import TRTLLM_INSTALL, load_trtllm_mha, probe_trtllm_mha
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

PAGE_SIZES = (16, 32, 64)
WORKSPACE_BYTES = 128 << 20
_KERNELS = "trtllm-gen"
_LAYOUT = "NHD"


@register_attention_backend("trtllm_mha")
class TRTLLMMHABackend(TritonBackend):
    """One workspace, zeroed once: the kernel counts in it and leaves its counters at zero."""

    capability: BackendCapability = replace(
        TritonBackend.capability,
        name="trtllm_mha",
        min_compute_capability=(10, 0),
        max_compute_capability=(10, 3),
        page_sizes=PAGE_SIZES,
        default_page_size=PAGE_SIZES[-1],
        has_logit_cap=False,
        has_unequal_head_dims=False,
        has_mla=False,
        head_dims=(64, 128, 256),
        install_hint=TRTLLM_INSTALL,
        why_not={
            **TritonBackend.capability.why_not,
            Feature.MLA: "trtllm_mla reads latents",
            Feature.CAP: "the decode kernels cap no logits",
            Feature.UNEQUAL_HEAD_DIMS: "the decode kernels know heads of one size",
            Feature.FP8_KV: "it is built for K and V in the model's dtype",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_trtllm_mha()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._kernel = load_trtllm_mha()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=config.device)
        self._float_sinks: dict[int, torch.Tensor] = {}

    def _make_decoder(self) -> TritonDecoder | None:
        return None

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata = self._step_metadata(layer)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        if metadata.batch_size == 0:
            return torch.empty_like(q)
        return self._kernel(
            query=with_dense_heads(q),
            kv_cache=tuple(self.token_to_kv_pool.get_kv_buffer(layer.layer_id)),
            workspace_buffer=self._workspace,
            block_tables=metadata.page_table,
            # Rows that pad a graph have a key, of the dummy page: the kernel expects one.
            seq_lens=metadata.cache_seqlens_int32.clamp(min=1),
            max_seq_len=metadata.max_seq_len_k,
            bmm1_scale=layer.scaling,
            window_left=metadata.window_size[0],
            sinks=self._sinks_of(layer),
            kv_layout=_LAYOUT,
            backend=_KERNELS,
        )

    def _sinks_of(self, layer: AttentionLayer) -> torch.Tensor | None:
        """As the kernel takes them, converted once."""
        if layer.sinks is None:
            return None
        if layer.layer_id not in self._float_sinks:
            self._float_sinks[layer.layer_id] = layer.sinks.detach().float().contiguous()
        return self._float_sinks[layer.layer_id]
