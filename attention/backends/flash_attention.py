"""FlashAttention-3 over the paged pool: prefill, decode and both in one step, eager or in graphs.

Follows the published description of SGLang's backend of this name (metadata once per step, maxima
from the host, static buffers for graphs). Knows its geometry and two pools, no request. The kernels
come from attention.kernels.providers; this module imports without them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

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
    MAX_PROMPT_TOKENS_PER_DECODE_ROW,
    MIN_DECODE_ROWS,
    MixedParts,
    StepCut,
    cut_mixed_step,
    num_leading_decode_rows,
)
from attention.backends.windowed_steps import WindowedSteps
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.providers import (
    FLASH_ATTENTION_3_INSTALL,
    FlashAttention3,
    load_flash_attention_3,
    load_triton_kernels,
    probe_flash_attention_3,
)
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
_KERNEL_CHOOSES_SPLITS = 0
_MIN_ANNOUNCED_QUERIES = 256
"""Of a row, at most: the package takes other tiles and other loads for up to 192 pairs of a query
and a head of its group (hopper/heuristics.h, flash_api.cpp), and never for more."""


@register_attention_backend("fa3")
class FlashAttentionBackend(PhasedAttentionBackend, WindowedSteps):
    """FlashAttention-3 on Hopper.

    num_splits: into how many parts the kernel may cut a row's keys; 0 leaves it to the kernel,
    which then balances rows of different lengths over the multiprocessors from device lengths.
    plans_splits_once: the first layer of each kind settles the splits for all layers of that kind,
    instead of every layer again, in decode steps and in graphs whose rows bring as many tokens
    each. min_decode_rows, max_prompt_tokens_per_decode_row: between these a mixed step's leading
    decode rows are attended by a decode call of their own.

    A CUDA graph records the filling of static tables, the kernels over them and that first layer's
    planning: a replay reads its own lengths and pages, never those of the capture.
    """

    captures_verify: ClassVar[bool] = True
    num_splits: ClassVar[int] = _KERNEL_CHOOSES_SPLITS
    plans_splits_once: ClassVar[bool] = True
    min_decode_rows: ClassVar[int] = MIN_DECODE_ROWS
    max_prompt_tokens_per_decode_row: ClassVar[int] = MAX_PROMPT_TOKENS_PER_DECODE_ROW

    capability: BackendCapability = BackendCapability(
        name="fa3",
        device_types=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        dtypes=(torch.bfloat16, torch.float16),
        kv_dtypes=(torch.bfloat16, torch.float16),
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=128,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=True,
        has_bounded_accounts=True,
        install_hint=FLASH_ATTENTION_3_INSTALL,
        # Those of `qv`: flash_api.cpp in the hopper folder of the flash-attention project.
        latent_dims=range(256, 513, 8),
        latent_rope_dims=range(8, 65, 8),
        head_dims=range(HEAD_DIM_MULTIPLE, MAX_HEAD_DIM + 1, HEAD_DIM_MULTIPLE),
        # V heads of another size: the same file.
        unequal_head_dims=(
            (range(136, 193, 8), range(104, 129, 8)),
            (range(8, 65, 8), range(8, MAX_HEAD_DIM + 1, 8)),
        ),
        why_not={
            Feature.CHUNKS: "fa3_chunks has them, as rows of their own",
            Feature.UNLIKE_LAYERS: "its tables and plans are made for heads of one kind",
            Feature.SHARED_KV: "each of its layers writes K and V",
            Feature.CROSS: "it makes no tables of an encoder's tokens",
            Feature.TREE: "the kernel takes no mask",
            Feature.ITEMS: "the kernel takes no mask",
            Feature.EVERYTHING: "the kernel is called causally only",
            Feature.FP8_KV: "fa3_fp8 reads it",
            Feature.DETERMINISTIC: "fa3_deterministic is; this one cuts a row's keys by its batch",
        },
    )

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
        self._kernels = load_flash_attention_3()
        self._check(config, self._kernels)
        self._triton = load_triton_kernels()
        self._planning_layers = _first_layers(config)
        self._schedules: dict[tuple[int, bool], torch.Tensor] = {}
        self._step_cuts: dict[int, StepCut] = {}
        self._sinks: dict[int, torch.Tensor] = {}

    @classmethod
    def _check(cls, config: AttentionConfig, kernels: FlashAttention3) -> None:
        """Raise AttentionBackendError for geometry that no kernel of the package covers."""
        cls._check_kv_dtype(config)
        dims = (config.head_dim, config.v_head_dim)
        if max(dims) > MAX_HEAD_DIM or any(dim % HEAD_DIM_MULTIPLE for dim in dims):
            raise AttentionBackendError(
                f"{cls.capability.name} needs head dims that are multiples of {HEAD_DIM_MULTIPLE} "
                f"up to {MAX_HEAD_DIM}, this model has {dims}"
            )
        if any(layer.has_sinks for layer in config.layers) and not kernels.has_sinks:
            raise AttentionBackendError(
                f"{kernels.package} has no attention sinks, which this model needs; "
                "sglang-kernel has them"
            )

    @classmethod
    def _check_kv_dtype(cls, config: AttentionConfig) -> None:
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"{cls.capability.name} reads a KV cache of the model's dtype {config.dtype}, "
                f"not {config.kv_dtype}"
            )

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        self._metadata = {
            window: metadata_of(tables[account], facts, window)
            for window, account in self._accounts.items()
        }
        self._schedules = {}

    def forward_extend(
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
        parts = self._cut(layer, metadata, forward_batch)
        out = self._wanted_out(layer, forward_batch)
        if parts is None:
            can_plan = forward_batch.is_captured and _is_even(metadata, q.shape[0])
            schedule = self._step_schedule(layer, metadata) if can_plan else None
            return self._attend(q, layer, metadata, schedule, out)
        return self._attend_parts(q, layer, parts, out)

    def _wanted_out(
        self, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor | None:
        """Where the step wants its output, if the kernels can write there."""
        if forward_batch.attention_out is None or not self._kernels.takes_out:
            return None
        return forward_batch.attention_out.view(-1, layer.tp_q_head_num, layer.v_head_dim)

    def _cut(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata, forward_batch: ForwardBatch
    ) -> MixedParts | None:
        """The step's parts, cut by its first layer of each window; None where one call is better.

        A plan puts decode rows first; rows that come in another order are attended together.
        """
        cut = self._step_cuts.get(layer.sliding_window_size)
        if cut is None or cut.whole is not metadata:
            num_rows = num_leading_decode_rows(forward_batch) if self._kernels.takes_out else 0
            pays = self._pays_to_cut(num_rows, forward_batch)
            cut = StepCut(metadata, cut_mixed_step(metadata, num_rows) if pays else None)
            self._step_cuts[layer.sliding_window_size] = cut
        return cut.parts

    def _pays_to_cut(self, num_decode_rows: int, forward_batch: ForwardBatch) -> bool:
        num_prompt_tokens = forward_batch.num_tokens - num_decode_rows
        most = self.max_prompt_tokens_per_decode_row * num_decode_rows
        is_mixed = self.min_decode_rows <= num_decode_rows < forward_batch.batch_size
        return is_mixed and num_prompt_tokens <= most

    def _attend_parts(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        parts: MixedParts,
        wanted_out: torch.Tensor | None,
    ) -> torch.Tensor:
        """As _attend, decode rows by the decode kernel, into one tensor."""
        shape = (q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        out = torch.empty(shape, dtype=self.config.dtype, device=q.device)
        if wanted_out is not None:
            out = wanted_out
        n = parts.num_decode_rows
        schedule = self._step_schedule(layer, parts.decode)
        self._attend(q[:n], layer, parts.decode, schedule, out[:n])
        self._attend(q, layer, parts.prefill, None, out)
        return out

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
        return self._attend(q, layer, metadata, self._step_schedule(layer, metadata))

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
        schedule: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(num_tokens, tp_q_head_num, v_head_dim) from q and the pool, in out where it is given."""
        if q.shape[0] == 0:
            return q.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        k_pages, v_pages = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return self._kernels.attend(
            q,
            k_pages,
            v_pages,
            cache_seqlens=metadata.cache_seqlens_int32,
            page_table=metadata.page_table,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seq_len_q,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=metadata.window_size,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
            scheduler_metadata=schedule,
            **self._layer_arguments(layer),
            **self._pool_arguments(layer, metadata),
            **({} if out is None else {"out": out}),
        )

    def _layer_arguments(self, layer: AttentionLayer) -> dict[str, Any]:
        """Arguments that only some layers have, and only some packages know."""
        return {} if layer.sinks is None else {"sinks": self._kernel_sinks(layer.layer_id, layer)}

    def _pool_arguments(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> dict[str, Any]:
        """Arguments that only some pools need."""
        return {}

    def _kernel_sinks(self, layer_id: int, layer: AttentionLayer) -> torch.Tensor:
        """The layer's sinks as the kernel takes them, converted once."""
        if layer_id not in self._sinks and layer.sinks is not None:
            self._sinks[layer_id] = layer.sinks.detach().to(torch.bfloat16).contiguous()
        return self._sinks[layer_id]

    def _step_schedule(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor | None:
        return self._schedule(layer, metadata) if self.plans_splits_once else None

    def _schedule(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor | None:
        """The plan of the layer's kind for this step; its first layer makes it.

        Made inside forward, so that a captured graph makes it anew from each replay's lengths.
        """
        kind = (layer.sliding_window_size, layer.logit_cap > 0.0)
        if layer.layer_id in self._planning_layers and metadata.batch_size:
            self._schedules[kind] = self._plan(layer, metadata)
        return self._schedules.get(kind)

    def _plan(self, layer: AttentionLayer, metadata: FlashAttentionMetadata) -> torch.Tensor:
        page_size = self.token_to_kv_pool.page_size
        return self._kernels.plan(
            metadata.batch_size,
            metadata.max_seq_len_q,
            # The kernel takes the page table's width for the longest row; so must the plan.
            metadata.page_table.shape[1] * page_size,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.head_dim,
            metadata.cache_seqlens_int32,
            qkv_dtype=self.config.kv_dtype,
            headdim_v=layer.v_head_dim,
            cu_seqlens_q=metadata.cu_seqlens_q,
            page_size=page_size,
            causal=True,
            window_size=metadata.window_size,
            has_softcap=layer.logit_cap > 0.0,
            num_splits=self.num_splits,
        )


@register_attention_backend("fa3_deterministic")
class DeterministicFlashAttentionBackend(FlashAttentionBackend):
    """FlashAttention-3 that has one kernel for every step and never splits a row's keys: a token's
    bits depend on its own keys alone. Slower where few rows have many keys.

    Blocks of keys begin at multiples of their size from a row's first key, and one whose keys a
    query does not see leaves its sums as they were, so that it does not matter where a chunk ends.
    With windows that does not hold: on an H200 a chunk had other bits than the whole prompt.
    """

    num_splits: ClassVar[int] = 1
    plans_splits_once: ClassVar[bool] = False
    min_decode_rows: ClassVar[int] = 1 << 30

    capability: BackendCapability = replace(
        FlashAttentionBackend.capability,
        name="fa3_deterministic",
        has_mla=False,
        has_sliding_window=False,
        has_bounded_accounts=False,
        why_not={
            **FlashAttentionBackend.capability.why_not,
            Feature.MLA: "it attends over heads; fa3 reads latents",
            Feature.WINDOW: "a window's bits were measured to depend on where a chunk begins; "
            "triton_deterministic has them",
            Feature.BOUNDED_ACCOUNTS: "they are kept for windows, which it has not",
        },
        is_deterministic=True,
    )

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        max_seq_len_q = max(facts.max_seq_len_q, _MIN_ANNOUNCED_QUERIES)
        super()._start_step(tables, replace(facts, max_seq_len_q=max_seq_len_q))


def _is_even(metadata: FlashAttentionMetadata, num_tokens: int) -> bool:
    """Whether a call with so many queries is one that a plan can be made for.

    The kernel bounds its splits, and with them its memory and its tiles, by the queries that it is
    given; a plan knows rows of max_seq_len_q only (get_num_splits in flash_api.cpp of SGLang's
    fork). What the two say is the same where all rows have as many.
    """
    return num_tokens == metadata.batch_size * metadata.max_seq_len_q


def _first_layers(config: AttentionConfig) -> frozenset[int]:
    """Layers before which no layer of the same kind (window, capped or not) comes."""
    kinds: dict[tuple[int, bool], int] = {}
    for layer_id, layer in enumerate(config.layers):
        kinds.setdefault((layer.sliding_window_size, layer.logit_cap > 0.0), layer_id)
    return frozenset(kinds.values())
