"""The backend that runs everywhere torch runs: plain torch operations over the paged pool.

It is the CPU backend and the functional fallback of a GPU without any kernel package. Every row of
one new token takes the batched decode kernel, whatever the mode; longer rows run one by one.
Knows its geometry and two pools, no request.
"""

from __future__ import annotations

import torch

from attention.backends.base import AttentionBackend
from attention.backends.torch_native_plan import TorchNativeMetadata, TorchNativePlanner
from attention.backends.torch_native_rows import ExtendRow, LayerPlan
from attention.capability import BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.torch_decode import MAX_CHUNK_KEY_BYTES, DecodeKernel
from attention.kernels.torch_extend import CausalBias, NoBias, explicit_block, sdpa_block
from attention.memory.layout import AccountRetention, FixedLength, LastTokens
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend
from attention.visibility import VisibilityKind

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@register_attention_backend("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Attention in plain torch.

    float32 results of a row do not depend on the page size or on the order of pages, and on the
    rest of the batch and on chunking only by rounding (about 1e-7). In steps of one new token, of
    which deterministic mode makes every other step on a CPU, not even by that.
    """

    capability: BackendCapability = BackendCapability(
        name="torch_native",
        device_types=("cpu", "cuda"),
        min_compute_capability=None,
        max_compute_capability=None,
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS,
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=16,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=True,
        has_chunked_attention=True,
        has_unlike_layers=True,
        has_shared_kv=True,
        has_bounded_accounts=True,
        has_cross_attention=True,
        visibilities=frozenset(VisibilityKind),
        is_deterministic=True,
        is_fallback=True,
        install_hint="part of torch, nothing to install",
        why_not={
            Feature.GRAPHS: "it plans a step from lengths on the host",
            Feature.FP8_KV: "torch_native_fp8 reads it",
            Feature.DETERMINISTIC: "torch's products round by the shape of the batch",
        },
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return BackendProbe(is_available=True)

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._planner = TorchNativePlanner(
            config,
            req_to_token_pool.tables,
            [pages * token_to_kv_pool.page_size for pages in token_to_kv_pool.pages_by_account],
            MAX_CHUNK_KEY_BYTES,
        )
        self._kinds = tuple(config.kind_of(layer_id) for layer_id in range(config.num_layers))
        self._decode = DecodeKernel()
        self._biases = {
            kind.retention: _bias_of(kind.retention, config) for kind in config.num_layers_by_kind
        }
        self._metadata: TorchNativeMetadata | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.check_visibility(forward_batch)
        self._metadata = self._planner.plan(forward_batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Rows with several new tokens one by one, one-token rows all at once."""
        metadata, plan = self._step_plan(layer)
        if save_kv_cache:
            cache_locs = forward_batch.cache_locs(self._kinds[layer.layer_id].account)
            self.token_to_kv_pool.set_kv_buffer(layer.layer_id, cache_locs, k, v)
        return self._attend(q, metadata, plan, layer)

    def _attend(
        self,
        q: torch.Tensor,
        metadata: TorchNativeMetadata,
        plan: LayerPlan,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        if metadata.is_plain_decode:
            return self._run_decode(q, plan, layer)
        allocate = torch.zeros if metadata.has_keyless else torch.empty
        out = allocate((*q.shape[:2], layer.v_head_dim), dtype=q.dtype, device=q.device)
        for row in plan.extend_rows:
            self._run_extend(q, row, layer, out)
        if plan.decode_chunks:
            tokens = metadata.decode_tokens
            decoded = self._run_decode(q.index_select(0, tokens), plan, layer)
            out.index_copy_(0, tokens, decoded)
        return out

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._attend(q, *self._step_plan(layer), layer)

    def _step_plan(self, layer: AttentionLayer) -> tuple[TorchNativeMetadata, LayerPlan]:
        if self._metadata is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        known = self.config.layers[layer.layer_id]
        if (layer.sliding_window_size, layer.chunk_size) != (
            known.sliding_window_size,
            known.chunk_size,
        ):
            raise ValueError(
                f"layer {layer.layer_id} has sliding_window_size={layer.sliding_window_size} and "
                f"chunk_size={layer.chunk_size}, the config knows {known}"
            )
        return self._metadata, self._metadata.plans[self._kinds[layer.layer_id]]

    def _run_decode(self, q: torch.Tensor, plan: LayerPlan, layer: AttentionLayer) -> torch.Tensor:
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return self._decode.run(q.float(), keys, values, plan.decode_chunks, layer).to(q.dtype)

    def _row_kv(
        self, layer: AttentionLayer, cache_indices: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (m, kv_heads, head_dim) and V (m, kv_heads, v_head_dim) of a row's cached tokens."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys = k.flatten(0, 1).index_select(0, cache_indices)
        values = v.flatten(0, 1).index_select(0, cache_indices)
        return keys.to(dtype), values.to(dtype)

    def _run_extend(
        self, q: torch.Tensor, row: ExtendRow, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """Fill the row's tokens of out. Keys come from the pool, so that what a token sees does
        not depend on whether it came in one chunk or in several."""
        keys, values = self._row_kv(layer, row.cache_indices, q.dtype)
        is_plain = layer.logit_cap <= 0.0 and layer.sinks is None
        run_block = sdpa_block if is_plain else explicit_block
        bias = row.bias or self._biases[self._kinds[layer.layer_id].retention]
        for block in row.blocks:
            visible = slice(block.first_key, block.stop_key)
            tokens = slice(row.first_token + block.first_query, row.first_token + block.stop_query)
            mask = bias.block(block)
            out[tokens] = run_block(q[tokens], keys[visible], values[visible], mask, layer)


def _bias_of(retention: AccountRetention, config: AttentionConfig) -> CausalBias | NoBias:
    if isinstance(retention, FixedLength):
        return NoBias()
    window = retention.num_tokens if isinstance(retention, LastTokens) else -1
    return CausalBias(window, config.dtype, config.device)
