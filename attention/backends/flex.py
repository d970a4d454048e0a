"""torch's FlexAttention over the paged pool, with a block mask of each step's own pages.

The way for masks that no other kernel has: windows and chunks of any size with draft trees, items
and later tokens, caps, sinks. Compiled by torch on CUDA; on CPU unfused and over the whole pool,
for tests. Eager steps only. Knows its geometry and two pools, no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionBackend
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.flex_kernel import FlexKernel, FlexShape, compiled_kernel, unfused_kernel
from attention.kernels.flex_pages import AccountPages, SeenPages
from attention.kernels.flex_tiles import TILE_ROWS, StepTiles, cut_step
from attention.kernels.flex_tree import TreeCells
from attention.kernels.providers import TRITON_INSTALL, probe_triton
from attention.memory.layout import FixedLength, Retention
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend
from attention.visibility import Tree, VisibilityKind

logger = logging.getLogger(__name__)

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256
PAGE_SIZE_MULTIPLE = 16
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step's layers share. seen: by retention and account."""

    tiles: StepTiles
    seen: dict[tuple[Retention, int], SeenPages]


@register_attention_backend("flex")
class FlexAttentionBackend(AttentionBackend):
    """One kernel for each height of tiles, cap, and kind of mask; steps of any size share them."""

    capability: BackendCapability = BackendCapability(
        name="flex",
        device_types=("cuda",),
        min_compute_capability=(8, 0),
        max_compute_capability=None,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        page_sizes=range(PAGE_SIZE_MULTIPLE, MAX_PAGE_SIZE + 1, PAGE_SIZE_MULTIPLE),
        default_page_size=64,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=False,
        has_chunked_attention=True,
        has_bounded_accounts=True,
        visibilities=frozenset(VisibilityKind),
        is_fallback=True,
        head_dims=range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1),
        install_hint=TRITON_INSTALL,
        why_not={
            Feature.MLA: "its masks are made for K and V of heads",
            Feature.GRAPHS: "its steps follow from lengths on the host",
            Feature.UNLIKE_LAYERS: "its tiles are made for heads of one kind",
            Feature.SHARED_KV: "each of its layers writes K and V",
            Feature.CROSS: "it makes no masks of an encoder's tokens",
            Feature.FP8_KV: "torch's kernel multiplies queries and keys of one dtype; triton_fp8 "
            "reads it",
            Feature.DETERMINISTIC: "the height of its tiles is of what shares the batch",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        """torch compiles to Triton."""
        return probe_triton()

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._check(config)
        self._group = config.tp_q_head_num // config.tp_k_head_num
        self._kinds = tuple(
            (_retention_of(config, layer_id), config.account_of(layer_id))
            for layer_id in range(config.num_layers)
        )
        self._accounts = {
            account: AccountPages(
                req_to_token_pool.tables[account],
                token_to_kv_pool.pages_by_account[account],
                token_to_kv_pool.page_size,
            )
            for _, account in self._kinds
        }
        is_cuda = config.device.type == "cuda"
        self._kernel_of: Callable[[FlexShape], FlexKernel] = (
            compiled_kernel if is_cuda else unfused_kernel
        )
        self._kernels: dict[FlexShape, FlexKernel] = {}
        self._step: _Step | None = None

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        """Raise AttentionBackendError for geometry that no kernel covers."""
        name, dims = cls.capability.name, (config.head_dim, config.v_head_dim)
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{name} reads a KV cache of the model's dtype {config.dtype}, not "
                f"{config.kv_dtype}; triton_fp8 reads e4m3"
            )
        if min(dims) < MIN_HEAD_DIM or max(dims) > MAX_HEAD_DIM:
            raise AttentionBackendError(
                f"{name} has kernels for heads of {MIN_HEAD_DIM} to {MAX_HEAD_DIM} elements, this "
                f"model has {dims}; torch_native has any"
            )
        if config.page_size % PAGE_SIZE_MULTIPLE:
            raise AttentionBackendError(
                f"{name} needs pages of a multiple of {PAGE_SIZE_MULTIPLE} tokens, not "
                f"{config.page_size}; ask for another page_size"
            )
        group = config.tp_q_head_num // config.tp_k_head_num
        if group > TILE_ROWS[-1]:
            raise AttentionBackendError(
                f"{name} has tiles for up to {TILE_ROWS[-1]} query heads a KV head, this model has "
                f"{group}; torch_native has any"
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.check_visibility(forward_batch)
        self._step = self._plan(forward_batch) if forward_batch.num_tokens else None

    @torch.inference_mode()
    def _plan(self, forward_batch: ForwardBatch) -> _Step:
        """In inference mode whoever calls: torch compiles anew for tensors made outside of it."""
        tiles = cut_step(self._group, forward_batch.extend_seq_lens_cpu, self.config.device)
        visibility = forward_batch.visibility
        cells = TreeCells(visibility, forward_batch) if isinstance(visibility, Tree) else None
        for account in self._accounts.values():
            account.start_step(forward_batch)
        seen = {
            (retention, account): self._accounts[account].see(
                tiles, forward_batch, retention, cells
            )
            for retention, account in dict.fromkeys(self._kinds)
        }
        return _Step(tiles, seen)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        kind = self._kinds[layer.layer_id]
        if save_kv_cache:
            places = forward_batch.cache_locs(kind[1])
            self.token_to_kv_pool.set_kv_buffer(layer.layer_id, places, k, v)
        if q.shape[0] == 0:
            return q.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        if self._step is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        return self._attend(q, layer, self._step.tiles, self._step.seen[kind], kind[1])

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        tiles: StepTiles,
        seen: SeenPages,
        account: int,
    ) -> torch.Tensor:
        positions = self._accounts[account].positions
        buffers = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        shape = self._shape_of(layer, tiles.shape.rows, seen.cells is not None)
        if shape not in self._kernels:
            self._prepare(shape, buffers, positions, seen)
        out, lse = self._kernels[shape].attend(tiles.cut(q), buffers, positions, seen)
        joined = tiles.join(out)
        if layer.sinks is None or lse is None:
            return joined
        return _with_sinks(joined, tiles.join(lse.unsqueeze(-1)), layer.sinks)

    def _shape_of(self, layer: AttentionLayer, tile_rows: int, is_tree: bool) -> FlexShape:
        return FlexShape(
            tile_rows=tile_rows,
            page_size=self.token_to_kv_pool.page_size,
            kv_heads=layer.tp_k_head_num,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=self.config.dtype,
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
            is_tree=is_tree,
            has_lse=layer.sinks is not None,
        )

    def _prepare(
        self,
        shape: FlexShape,
        buffers: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        seen: SeenPages,
    ) -> None:
        """Compile the kernels of every height of tiles, so that only a layer of a new kind, in its
        first step, takes that long."""
        began = time.monotonic()
        for rows in TILE_ROWS:
            kernel = self._kernel_of(replace(shape, tile_rows=rows))
            self._kernels[kernel.shape] = kernel
            if kernel.is_compiled:
                kernel.compile(buffers, positions, seen)
        logger.info("flex: kernels ready after %.1f s: %s", time.monotonic() - began, shape)


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """A sink takes its share of the softmax: out (n, heads, dim), lse (n, heads, 1), sinks
    (heads,)."""
    kept = torch.sigmoid(lse - sinks.float().view(1, -1, 1))
    return (out.float() * kept).to(out.dtype)


def _retention_of(config: AttentionConfig, layer_id: int) -> Retention:
    retention = config.layers[layer_id].retention
    if isinstance(retention, FixedLength):
        raise AttentionBackendError("flex has no cross-attention; torch_native has")
    return retention
