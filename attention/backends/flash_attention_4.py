"""FlashAttention-4 (CuTe) over the paged pool: prefill, decode and both in one step.

Its kernels are compiled for each kind of layer by the package, which takes seconds: when the
backend is built, not in a step. They split no row's keys on Hopper, so that few long rows decode
slowly there, and read no FP8. Knows its geometry and two pools, no request.
"""

from __future__ import annotations

import logging
import time

import torch

from attention.backends.flash_attention_metadata import (
    FlashAttentionMetadata,
    StepFacts,
    metadata_of,
)
from attention.backends.flash_attention_steps import AccountTables
from attention.backends.windowed_steps import WindowedSteps
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, AttentionConfig, LayerAttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.providers import (
    FLASH_ATTENTION_4_INSTALL,
    load_flash_attention_4,
    load_triton_kernels,
    probe_flash_attention_4,
)
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 128
HEAD_DIM_MULTIPLE = 16
_PREFILL_TOKENS = 1024
_HALVES = (torch.bfloat16, torch.float16)

Window = tuple[int | None, int | None]


@register_attention_backend("fa4")
class FlashAttention4Backend(WindowedSteps):
    """FlashAttention-4 on Hopper and on Blackwell of data centres.

    What flash-attn-4 4.0.0b15 asks of a paged step (its interface.py, paged_kv.py and
    flash_fwd_sm90.py): heads of whole 16 elements, of at most 128, as its loads of pages take tiles
    of 128 keys and larger heads have smaller ones on sm90; the pool's dtype is the query's.
    """

    capability: BackendCapability = BackendCapability(
        name="fa4",
        device_types=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(10, 3),
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=128,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=False,
        has_bounded_accounts=True,
        head_dims=range(HEAD_DIM_MULTIPLE, MAX_HEAD_DIM + 1, HEAD_DIM_MULTIPLE),
        install_hint=FLASH_ATTENTION_4_INSTALL,
        why_not={
            Feature.MLA: "the package has it for Blackwell, and over no pages",
            Feature.CHUNKS: "its windows end at each query; fa3_chunks has chunks",
            Feature.UNLIKE_LAYERS: "its tables are made for heads of one kind",
            Feature.SHARED_KV: "each of its layers writes K and V",
            Feature.CROSS: "it makes no tables of an encoder's tokens",
            Feature.TREE: "its masks are causal",
            Feature.ITEMS: "its masks are causal",
            Feature.EVERYTHING: "its masks are causal",
            Feature.FP8_KV: "the package has it for Blackwell only; fa3_fp8 reads it",
            Feature.DETERMINISTIC: "no test has shown it",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return probe_flash_attention_4()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._check(config)
        self._triton = load_triton_kernels()
        self._attend_pages = load_flash_attention_4().attend
        self._sinks: dict[int, torch.Tensor] = {}
        self._compile()

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        """Raise AttentionBackendError for geometry that no kernel covers."""
        name, dims = cls.capability.name, (config.head_dim, config.v_head_dim)
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{name} reads a KV cache of the model's dtype {config.dtype}, not "
                f"{config.kv_dtype}; fa3_fp8 and triton_fp8 read e4m3"
            )
        if max(dims) > MAX_HEAD_DIM or any(dim % HEAD_DIM_MULTIPLE for dim in dims):
            raise AttentionBackendError(
                f"{name} needs heads of a multiple of {HEAD_DIM_MULTIPLE} elements up to "
                f"{MAX_HEAD_DIM} in a paged cache, this model has {dims}; fa3 and triton have "
                "kernels for up to 256"
            )

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        self._metadata = {
            window: metadata_of(tables[account], facts, window)
            for window, account in self._accounts.items()
        }

    def forward(
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
        if q.shape[0] == 0:
            return q.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        return self._attend(q, layer, metadata)

    def _attend(
        self, q: torch.Tensor, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor:
        """(num_tokens, tp_q_head_num, v_head_dim)."""
        k_pages, v_pages = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        out, _ = self._attend_pages(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seqused_k=metadata.cache_seqlens_int32,
            max_seqlen_q=metadata.max_seq_len_q,
            max_seqlen_k=metadata.max_seq_len_k,
            page_table=metadata.page_table,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=_kernel_window(layer.sliding_window_size),
            softcap=layer.logit_cap,
            learnable_sink=self._kernel_sinks(layer),
        )
        return out

    def _kernel_sinks(self, layer: AttentionLayer) -> torch.Tensor | None:
        """The layer's sinks as the kernel takes them, converted once."""
        if layer.sinks is None:
            return None
        if layer.layer_id not in self._sinks:
            self._sinks[layer.layer_id] = layer.sinks.detach().to(torch.bfloat16).contiguous()
        return self._sinks[layer.layer_id]

    @torch.inference_mode()
    def _compile(self) -> None:
        """One call for each kind of layer, over one key of the dummy page. On Blackwell prompts
        have kernels of their own, told by max_seqlen_q."""
        began = time.monotonic()
        kinds = {
            (layer.sliding_window_size > 0, layer.logit_cap, layer.has_sinks): layer
            for layer in self.config.layers
        }
        for layer in kinds.values():
            for max_seqlen_q in (1, _PREFILL_TOKENS):
                self._attend_nothing(layer, max_seqlen_q)
        took = time.monotonic() - began
        logger.info("fa4: kernels of %d kinds of layers ready after %.1f s", len(kinds), took)

    def _attend_nothing(self, layer: LayerAttentionConfig, max_seqlen_q: int) -> None:
        config, device = self.config, self.config.device
        k_pages, v_pages = self.token_to_kv_pool.get_kv_buffer(0)
        heads = config.tp_q_head_num
        ones = torch.ones(1, dtype=torch.int32, device=device)
        sinks = torch.zeros(heads, dtype=torch.bfloat16, device=device)
        self._attend_pages(
            torch.zeros((1, heads, config.head_dim), dtype=config.dtype, device=device),
            k_pages,
            v_pages,
            cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=device),
            seqused_k=ones,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=config.max_context_len,
            page_table=torch.zeros((1, 2), dtype=torch.int32, device=device),
            softmax_scale=config.head_dim**-0.5,
            causal=True,
            window_size=_kernel_window(layer.sliding_window_size),
            softcap=layer.logit_cap,
            learnable_sink=sinks if layer.has_sinks else None,
        )


def _kernel_window(sliding_window_size: int) -> Window:
    """Keys before and behind a query's own. Ours counts its own, too."""
    return (sliding_window_size - 1, 0) if sliding_window_size > 0 else (None, None)
