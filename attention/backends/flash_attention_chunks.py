"""FlashAttention-3 for layers whose queries see the chunk of positions that they stand in.

A row's new tokens of one chunk are a row of their own to the kernel, whose keys begin with the
chunk: "virtual batches", as the published description of SGLang's backend has them. No mask is
made. Chunks begin where pages begin. Layers without chunks run as on fa3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_metadata import (
    FlashAttentionMetadata,
    StepFacts,
    metadata_of,
)
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.chunk_rows import (
    ChunkRows,
    chunk_rows,
    decoding_chunk_rows,
    fill_chunk_tables,
)
from attention.kernels.step_tables import StepTables
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

_ALL_KEYS = -1


@register_attention_backend("fa3_chunks")
class ChunkedFlashAttentionBackend(FlashAttentionBackend):
    """fa3 for models with chunks. Raises AttentionBackendError where a chunk holds no whole number
    of pages."""

    captures_verify: ClassVar[bool] = False

    capability: BackendCapability = replace(
        FlashAttentionBackend.capability,
        name="fa3_chunks",
        has_mla=False,
        has_chunked_attention=True,
        has_chunks_of_any_size=False,
        why_not={
            **FlashAttentionBackend.capability.why_not,
            Feature.MLA: "models with chunks keep heads; fa3 reads latents",
        },
    )

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._chunk_accounts = {
            layer.chunk_size: config.account_of(layer_id)
            for layer_id, layer in enumerate(config.layers)
            if layer.chunk_size > 0
        }
        for chunk_size in self._chunk_accounts:
            if chunk_size % config.page_size:
                raise AttentionBackendError(
                    f"fa3_chunks cuts rows where pages begin: chunks of {chunk_size} tokens are no "
                    f"whole number of pages of {config.page_size}"
                )
        self._chunks: dict[int, FlashAttentionMetadata] = {}
        self._graph_chunks: dict[int, StepTables] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        is_decode = forward_batch.forward_mode.is_decode
        for chunk_size in self._chunk_accounts:
            make_rows = decoding_chunk_rows if is_decode else chunk_rows
            rows = make_rows(forward_batch, chunk_size)
            tables = self._chunk_tables(chunk_size, rows.num_rows)
            self._fill_chunk(tables, chunk_size, forward_batch, rows)
            facts = StepFacts(rows.num_rows, rows.max_new_tokens, rows.max_keys)
            self._chunks[chunk_size] = metadata_of(tables, facts, _ALL_KEYS)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        super().init_cuda_graph_state(max_bs)
        self._graph_chunks = {
            chunk_size: self._chunk_tables(chunk_size, max_bs)
            for chunk_size in self._chunk_accounts
        }

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata_capture_cuda_graph(forward_batch)
        for chunk_size, tables in self._graph_chunks.items():
            facts = StepFacts(forward_batch.batch_size, 1, chunk_size)
            self._chunks[chunk_size] = metadata_of(tables, facts, _ALL_KEYS)

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        super().record_step_tables(forward_batch)
        for chunk_size, tables in self._graph_chunks.items():
            rows = decoding_chunk_rows(forward_batch, chunk_size)
            self._fill_chunk(tables, chunk_size, forward_batch, rows)

    def _chunk_tables(self, chunk_size: int, num_rows: int) -> StepTables:
        num_pages = min(chunk_size, self.config.max_context_len) // self.config.page_size + 1
        return StepTables.allocate(num_rows, num_pages, self.config.device)

    def _fill_chunk(
        self, tables: StepTables, chunk_size: int, forward_batch: ForwardBatch, rows: ChunkRows
    ) -> None:
        table = self.req_to_token_pool.own_tables[self._chunk_accounts[chunk_size]]
        slots = forward_batch.req_pool_indices
        fill_chunk_tables(table, slots, rows, tables, self.token_to_kv_pool.page_size)

    def _step_metadata(self, layer: AttentionLayer) -> FlashAttentionMetadata:
        if layer.chunk_size <= 0:
            return super()._step_metadata(layer)
        metadata = self._chunks.get(layer.chunk_size)
        if metadata is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        return metadata

    def _places(self, layer: AttentionLayer, forward_batch: ForwardBatch) -> torch.Tensor:
        if layer.chunk_size <= 0:
            return super()._places(layer, forward_batch)
        return forward_batch.cache_locs(self._chunk_accounts[layer.chunk_size])

    def _schedule(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor | None:
        """Layers with chunks leave it to every call: plans are by window."""
        return None if layer.chunk_size > 0 else super()._schedule(layer, metadata)
