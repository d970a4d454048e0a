"""This repository's own Triton kernels over the paged pool: prefill, decode, verification, graphs.

For every CUDA GPU from sm80 on, with tiles by what the GPU has room for. Decode steps take the
split-KV kernels that fa3_triton has (triton_decoder.py), everything else, and decode steps of heads
that those do not know, the extend kernel (attention/kernels/triton_extend.py). Knows its geometry
and two pools, no request.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attention.backends.base import PhasedAttentionBackend
from attention.backends.flash_attention_metadata import (
    FlashAttentionMetadata,
    StepFacts,
    metadata_of,
)
from attention.backends.flash_attention_steps import (
    AccountTables,
)
from attention.backends.mixed_batches import (
    MIN_DECODE_ROWS,
    cut_mixed_step,
    num_leading_decode_rows,
)
from attention.backends.triton_decoder import TritonDecoder, score_rule, with_dense_heads
from attention.backends.windowed_steps import WindowedSteps
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, fitting_tuning
from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gpu_limits import gpu_limits
from attention.kernels.paged_extend import ExtendRows, PagedExtend, PagedKeys, SeenKeys
from attention.kernels.providers import TRITON_INSTALL, load_triton_kernels, probe_triton
from attention.kernels.warpgroup_extend import make_extend
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from attention.registration import register_attention_backend
from attention.visibility import CAUSAL, Causal, Visibility, VisibilityKind

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512
MAX_ROPE_DIM = 64
_HALVES = (torch.bfloat16, torch.float16)


@register_attention_backend("triton")
class TritonBackend(PhasedAttentionBackend, WindowedSteps):
    """Triton kernels over a pool of the model's dtype.

    In a mixed step, leading decode rows are attended by the decode kernels where they are many.
    """

    captures_verify: ClassVar[bool] = True

    capability: BackendCapability = BackendCapability(
        name="triton",
        device_types=("cuda",),
        min_compute_capability=(8, 0),
        max_compute_capability=None,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=64,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=True,
        has_bounded_accounts=True,
        visibilities=frozenset(VisibilityKind),
        install_hint=TRITON_INSTALL,
        latent_dims=range(8, MAX_LATENT_DIM + 1, 8),
        latent_rope_dims=range(8, MAX_ROPE_DIM + 1, 8),
        head_dims=range(1, MAX_HEAD_DIM + 1),
        why_not={
            Feature.CHUNKS: "its decode kernels know windows only",
            Feature.UNLIKE_LAYERS: "its tables and plans are made for heads of one kind",
            Feature.SHARED_KV: "each of its layers writes K and V",
            Feature.CROSS: "it makes no tables of an encoder's tokens",
            Feature.FP8_KV: "triton_fp8 reads it",
            Feature.DETERMINISTIC: "triton_deterministic is; this one cuts keys by its batch",
        },
    )

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
        self._check(config)
        self._triton = load_triton_kernels()
        self._limits = gpu_limits(config.device)
        try:
            self._extend = self._make_extend()
        except ValueError as error:
            raise AttentionBackendError(f"{self.capability.name}: {error}") from error
        self._decoder = self._make_decoder()
        self._num_decode_rows = 0

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        """Raise AttentionBackendError for geometry that no kernel covers."""
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{cls.capability.name} reads a KV cache of the model's dtype {config.dtype}, "
                f"not {config.kv_dtype}"
            )
        cls._check_dims(config)

    @classmethod
    def _check_dims(cls, config: AttentionConfig) -> None:
        dims = (config.head_dim, config.v_head_dim)
        if max(dims) > MAX_HEAD_DIM:
            raise AttentionBackendError(
                f"{cls.capability.name} has kernels for heads of up to {MAX_HEAD_DIM} elements, "
                f"this model has {dims}"
            )

    def _geometry(self) -> ExtendGeometry:
        config = self.config
        return ExtendGeometry(
            kv_heads=config.tp_k_head_num,
            group=config.tp_q_head_num // config.tp_k_head_num,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            page_size=self.token_to_kv_pool.page_size,
            element_bytes=config.dtype.itemsize,
        )

    def _make_extend(self) -> PagedExtend:
        """Raises ValueError where no tiles fit the device."""
        return make_extend(self._geometry(), self.config.dtype, self._limits)

    def _make_decoder(self) -> TritonDecoder | None:
        """None where the extend kernel decodes too: the others know K and V heads of one size."""
        if self.config.v_head_dim != self.config.head_dim:
            return None
        return TritonDecoder(self.config, self.token_to_kv_pool, self._tuning_of)

    def _tuning_of(self, geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
        return fitting_tuning(geometry, num_rows, self._limits.shared_bytes)

    def fuses_decode_projection(self, num_rows: int) -> bool:
        return self._decoder is not None and self._decoder.fuses_projection(num_rows)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan_decode(self._count_decode_rows(forward_batch))

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        super().record_step_tables(forward_batch)
        self._plan_decode(self._count_decode_rows(forward_batch))

    def _count_decode_rows(self, forward_batch: ForwardBatch) -> int:
        """How many of the step's first rows the decode kernels attend."""
        if forward_batch.forward_mode.is_decode:
            return forward_batch.batch_size
        if not isinstance(forward_batch.visibility, Causal):
            return 0
        num_rows = num_leading_decode_rows(forward_batch)
        return num_rows if MIN_DECODE_ROWS <= num_rows < forward_batch.batch_size else 0

    def _plan_decode(self, num_rows: int) -> None:
        """All windows' metadata share their lengths."""
        if self._decoder is not None and num_rows:
            lengths = next(iter(self._metadata.values())).cache_seqlens_int32
            self._decoder.plan(lengths[:num_rows])
            self._num_decode_rows = num_rows

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        self._metadata = {
            window: metadata_of(tables[account], facts, window)
            for window, account in self._accounts.items()
        }
        self._num_decode_rows = 0
        if self._decoder is not None:
            self._decoder.forget_plans()

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
        if self._decoder is not None and metadata.batch_size:
            return self._decoder.attend(q, layer, metadata)
        return self._run_extend(q, layer, metadata, CAUSAL, forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata, n = self._step_metadata(layer), self._num_decode_rows
        self._save(k, v, layer, forward_batch, save_kv_cache)
        if self._decoder is None or n == 0:
            return self._run_extend(q, layer, metadata, forward_batch.visibility, forward_batch)
        parts = cut_mixed_step(metadata, n)
        out = self._run_extend(q, layer, parts.prefill, CAUSAL, forward_batch)
        out[:n] = self._decoder.attend(q[:n], layer, parts.decode)
        return out

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As fa3_triton's, with what it asks of the launches before."""
        if self._decoder is None or not self._decoder.can_fuse_projection:
            return super().forward_projected(projection, layer, forward_batch)
        places = self._places(layer, forward_batch)
        metadata = self._step_metadata(layer)
        return self._decoder.attend_projected(projection, places, layer, metadata)

    def _run_extend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
        visibility: Visibility,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """(num_tokens, tp_q_head_num, v_head_dim), in forward_batch.attention_out if it has one."""
        shape = (len(q), layer.tp_q_head_num, layer.v_head_dim)
        if forward_batch.attention_out is None:
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        else:
            out = forward_batch.attention_out.view(shape)
        rows = ExtendRows(
            metadata.cu_seqlens_q,
            metadata.cache_seqlens_int32,
            metadata.page_table,
            metadata.max_seq_len_q,
            metadata.max_seq_len_k,
        )
        seen = SeenKeys(visibility, layer.sliding_window_size, forward_batch.positions)
        self._extend.attend(
            with_dense_heads(q), self._keys_of(layer), rows, seen, score_rule(layer), out
        )
        return out

    def _keys_of(self, layer: AttentionLayer) -> PagedKeys:
        return PagedKeys(*self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
