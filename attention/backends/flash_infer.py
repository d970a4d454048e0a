"""FlashInfer over the paged pool: prefill, decode, verification, and decode in graphs.

Decode rows go to BatchDecodeWithPagedKVCacheWrapper, everything else to
BatchPrefillWithPagedKVCacheWrapper, one of each for every kind of layers that differ in window or
cap. Knows its geometry and two pools, no request.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attention.backends.flash_infer_masks import pack_mask
from attention.backends.flash_infer_steps import FlashInferSteps, LayerKind, accounts_by_kind
from attention.backends.flash_infer_workspace import (
    FlashInferWorkspace,
    eager_bytes,
    graph_bytes,
)
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.flash_infer import (
    FLASH_INFER_INSTALL,
    FlashInfer,
    KernelModule,
    compile_modules,
    load_flash_infer,
    probe_flash_infer,
    read_mask,
    uncompiled,
)
from attention.kernels.page_lists import HostRows, PageLists
from attention.kernels.providers import load_page_lists, probe_triton
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend
from attention.visibility import Causal, VisibilityKind

HEAD_DIMS = (64, 128, 256)
_HALVES = (torch.bfloat16, torch.float16)
_LAYOUT = "NHD"
# Of the package's two sets of kernels the one that splits keys, has masks and runs from sm80 on.
_KERNELS = "fa2"
_MIN_TENSOR_CORE_GROUP = 4
_NO_ROTATION = 0
_UNSCALED = 1.0  # layers bring their scaling with run


@register_attention_backend("flashinfer")
class FlashInferBackend(FlashInferSteps):
    """FlashInfer's kernels over a pool of the model's dtype.

    Plans need the rows' lengths on the host, and these must be the device's: where a plan cuts a
    row's keys, kernels find the parts' results by both.
    """

    capability: BackendCapability = BackendCapability(
        name="flashinfer",
        device_types=("cuda",),
        min_compute_capability=(8, 0),
        max_compute_capability=None,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=64,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=False,
        has_unequal_head_dims=False,
        has_mixed_batches=True,
        has_mla=True,
        has_bounded_accounts=True,
        visibilities=frozenset(VisibilityKind),
        install_hint=FLASH_INFER_INSTALL,
        latent_dims=range(512, 513),
        latent_rope_dims=range(64, 65),
        head_dims=HEAD_DIMS,
        why_not={
            Feature.CHUNKS: "its kernels know windows only",
            Feature.SINKS: "its wrappers are built without them",
            Feature.UNEQUAL_HEAD_DIMS: "it is built for heads of one size",
            Feature.UNLIKE_LAYERS: "its plans are made for heads of one kind",
            Feature.SHARED_KV: "each of its layers writes K and V",
            Feature.CROSS: "it makes no tables of an encoder's tokens",
            Feature.FP8_KV: "flashinfer_fp8 reads it",
            Feature.DETERMINISTIC: "its plans cut a row's keys by what shares the batch",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        found = probe_triton()
        return probe_flash_infer() if found.is_available else found

    @classmethod
    def compiles_first(cls, config: AttentionConfig) -> str:
        return uncompiled(partial(kernel_modules, config, load_flash_infer()))

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._check(config)
        self._kernels = load_flash_infer()
        self._fill_page_lists = load_page_lists()
        compile_modules(partial(kernel_modules, config, self._kernels))
        num_bytes = eager_bytes(config.device, _group(config), config.head_dim)
        self._workspace = FlashInferWorkspace(len(self._accounts), num_bytes, config.device)
        self._decode = {kind: self._new_decode(kind) for kind in self._accounts}
        self._extend = {kind: self._new_extend(kind) for kind in self._accounts}

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        """Raise AttentionBackendError for geometry that no kernel covers."""
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{cls.capability.name} reads a KV cache of the model's dtype {config.dtype}, not "
                f"{config.kv_dtype}; flashinfer_fp8 reads torch.float8_e4m3fn"
            )
        cls._check_dims(config)

    @classmethod
    def _check_dims(cls, config: AttentionConfig) -> None:
        dims, known = (config.head_dim, config.v_head_dim), ", ".join(map(str, HEAD_DIMS))
        if config.head_dim not in HEAD_DIMS or config.v_head_dim != config.head_dim:
            raise AttentionBackendError(
                f"{cls.capability.name} has kernels for heads of {known} elements, this model has "
                f"K and V heads of {dims}; triton has all up to 256"
            )

    def _new_decode(self, kind: LayerKind, **buffers: Any) -> Any:
        """buffers: of a graph's rows, which its replays read."""
        wrapper = self._kernels.decode(
            self._workspace.buffer,
            _LAYOUT,
            use_tensor_cores=_takes_tensor_cores(self.config, kind),
            backend=_KERNELS,
            **buffers,
        )
        return self._workspace.adopt(wrapper, self._number_of(kind))

    def _new_extend(self, kind: LayerKind) -> Any:
        wrapper = self._kernels.prefill(self._workspace.buffer, _LAYOUT, backend=_KERNELS)
        return self._workspace.adopt(wrapper, self._number_of(kind))

    def _new_graphed(self, kind: LayerKind, lists: PageLists) -> Any:
        return self._new_decode(
            kind,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=lists.indptr,
            paged_kv_indices_buffer=lists.indices,
            paged_kv_last_page_len_buffer=lists.last_page_lens,
        )

    def _graph_bytes(self, max_bs: int) -> int:
        heads = (self.config.tp_q_head_num, self.config.tp_k_head_num, self.config.head_dim)
        return graph_bytes(self.config.device, max_bs, *heads)

    def _plan_decode(
        self, wrapper: Any, kind: LayerKind, rows: HostRows, indices: torch.Tensor
    ) -> None:
        self._workspace.plan(
            wrapper,
            rows.kv_indptr,
            indices,
            rows.last_page_lens,
            self.config.tp_q_head_num,
            self.config.tp_k_head_num,
            self.config.head_dim,
            self.token_to_kv_pool.page_size,
            **self._scoring(kind, kind.window_left),
        )

    def _plan_extend(
        self,
        wrapper: Any,
        kind: LayerKind,
        rows: HostRows,
        indices: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> None:
        is_causal = isinstance(forward_batch.visibility, Causal)
        mask = None if is_causal else pack_mask(forward_batch, kind.retention)
        # A mask's cells hide what a window does, which counts positions and not places.
        masked_left = self.config.max_context_len if kind.window > 0 else -1
        self._workspace.plan(
            wrapper,
            rows.qo_indptr,
            rows.kv_indptr,
            indices,
            rows.last_page_lens,
            self.config.tp_q_head_num,
            self.config.tp_k_head_num,
            self.config.head_dim,
            self.token_to_kv_pool.page_size,
            causal=is_causal,
            packed_custom_mask=None if mask is None else mask.bits,
            **self._scoring(kind, masked_left if mask is not None else kind.window_left),
        )
        if mask is not None:
            read_mask(wrapper, mask.begins)

    def _scoring(self, kind: LayerKind, window_left: int) -> dict[str, Any]:
        return {
            "window_left": window_left,
            "logits_soft_cap": kind.logit_cap,
            "sm_scale": _UNSCALED,
            "q_data_type": self.config.dtype,
            "kv_data_type": self.config.kv_dtype,
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
        kind = self._kind_of(layer)
        if save_kv_cache:
            places = forward_batch.cache_locs(self._accounts[kind])
            self.token_to_kv_pool.set_kv_buffer(layer.layer_id, places, k, v)
        shape = (len(q), layer.tp_q_head_num, layer.v_head_dim)
        out = forward_batch.attention_out
        out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out.view(shape)
        if len(q) == 0:
            return out
        attended: torch.Tensor = self._wrapper_of(kind).run(
            q,
            self.token_to_kv_pool.get_kv_buffer(layer.layer_id),
            q_scale=layer.scaling,
            **self._pool_arguments(layer),
            out=out,
            # Launches behind it may be dependent ones, which wait for their predecessor alone.
            enable_pdl=False,
        )
        return attended

    def _pool_arguments(self, layer: AttentionLayer) -> dict[str, float]:
        """Arguments that only some pools need."""
        return {}

    def _kind_of(self, layer: AttentionLayer) -> LayerKind:
        kind = LayerKind(layer.sliding_window_size, layer.logit_cap)
        if kind not in self._accounts:
            raise ValueError(
                f"layer {layer.layer_id} is of {kind}, the config knows {list(self._accounts)}"
            )
        return kind


def kernel_modules(config: AttentionConfig, kernels: FlashInfer) -> list[KernelModule]:
    """What steps of the config's layers run, of every kind."""
    modules = {}
    for kind in accounts_by_kind(config):
        variant = (kind.window > 0, kind.logit_cap > 0.0)
        dtypes = (config.dtype, config.kv_dtype, config.dtype, torch.int32)
        shared = (*dtypes, config.head_dim, config.head_dim, _NO_ROTATION, *variant)
        modules["prefill", variant] = kernels.prefill_module(_KERNELS, *shared, False)
        if not _takes_tensor_cores(config, kind):
            modules["decode", variant] = kernels.decode_module(*shared)
    return list(modules.values())


def _takes_tensor_cores(config: AttentionConfig, kind: LayerKind) -> bool:
    """Whether decode rows do: they pay from groups of four heads on, and where keys have to become
    another dtype. Kernels without read the keys before a window, too."""
    is_converted = config.kv_dtype != config.dtype
    return is_converted or _group(config) >= _MIN_TENSOR_CORE_GROUP or kind.window > 0


def _group(config: AttentionConfig) -> int:
    return config.tp_q_head_num // config.tp_k_head_num
