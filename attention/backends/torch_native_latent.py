"""torch_native for models with multi-head latent attention: plain torch over the pool of latents.

Rows of one new token take the absorbed form, all at once. Longer rows take the form that costs them
less, one by one and one piece of their keys after another, so that no more than KEYS_PER_PIECE
tokens are ever up-projected at a time. Knows its geometry and two pools, no request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attention.backends.base import LatentAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.backends.torch_native_rows import seen_row
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.merge_states import AttentionState, merge_states
from attention.kernels.torch_decode import (
    MAX_CHUNK_KEY_BYTES,
    DecodeChunk,
    DecodePlanner,
    SingleTokenRows,
)
from attention.kernels.torch_extend import QueryBlock
from attention.kernels.torch_latent import (
    AbsorbedKeys,
    ExpandedKeys,
    absorb_queries,
    absorbing_pays,
    attend_absorbed,
    project_values,
)
from attention.kernels.torch_visible import VisibleBias
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.layout import EveryToken
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_latent_backend
from attention.visibility import Causal

KEYS_PER_PIECE = 512
QUERIES_PER_BLOCK = 128


@dataclass(frozen=True, slots=True)
class LatentRow:
    """A row with several new tokens, first_token .. stop_token - 1 of the step.

    cache_indices: int32 (prefix_len + new tokens,), the row's tokens, oldest first. bias: what its
    new tokens see, None where they see all up to themselves.
    """

    first_token: int
    stop_token: int
    prefix_len: int
    cache_indices: torch.Tensor
    bias: VisibleBias | None

    def pieces(self) -> Iterator[tuple[int, int]]:
        """[first, stop) ranges of keys."""
        num_keys = len(self.cache_indices)
        for first in range(0, num_keys, KEYS_PER_PIECE):
            yield first, min(first + KEYS_PER_PIECE, num_keys)

    def query_blocks(self, first_key: int) -> Iterator[tuple[int, int]]:
        """[first, stop) ranges of the row's new tokens that may see the key at first_key."""
        num_new = self.stop_token - self.first_token
        first_query = max(0, first_key - self.prefix_len) if self.bias is None else 0
        for first in range(first_query, num_new, QUERIES_PER_BLOCK):
            yield first, min(first + QUERIES_PER_BLOCK, num_new)

    def hidden(self, block: QueryBlock) -> torch.Tensor | None:
        """bool (queries, keys) of the block, on any device; None where all are seen."""
        if self.bias is not None:
            return ~self.bias.seen(block)
        first, stop = self.prefix_len + block.first_query, self.prefix_len + block.stop_query
        return _hidden(first, stop, block.first_key, block.stop_key)


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """A step. decode_tokens: int64 (n,), the one-token rows' tokens, in planned order."""

    decode_tokens: torch.Tensor
    decode_chunks: list[DecodeChunk]
    rows: list[LatentRow]


@register_latent_backend("torch_native")
class TorchNativeLatentBackend(LatentAttentionBackend):
    """Multi-head latent attention in plain torch.

    float32 results of a row do not depend on the page size or on the order of pages, and on the
    rest of the batch and on chunking only by rounding.
    """

    capability: BackendCapability = TorchNativeBackend.capability

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
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            name = type(token_to_kv_pool).__name__
            raise AttentionBackendError(f"latent attention reads a LatentTokenToKVPool, not {name}")
        self._pool = token_to_kv_pool
        num_slots = token_to_kv_pool.num_pages * token_to_kv_pool.page_size
        # One head: all heads read the same latents, so a chunk names each token once.
        token_bytes = self._pool.entry.elements_per_token * torch.float32.itemsize
        max_chunk_tokens = max(1, MAX_CHUNK_KEY_BYTES // token_bytes)
        table = req_to_token_pool.req_to_token
        self._planner = DecodePlanner(table, num_slots, 1, 1, max_chunk_tokens)
        self._metadata: LatentMetadata | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.check_visibility(forward_batch)
        num_new = forward_batch.extend_seq_lens_cpu.astype(np.int64)
        seq_lens = forward_batch.seq_lens_cpu.astype(np.int64)
        first_tokens = np.cumsum(num_new) - num_new
        decode, longer = forward_batch.decode_rows()
        rows = torch.from_numpy(decode).to(self.config.device)
        decode_rows = SingleTokenRows(forward_batch.req_pool_indices[rows], seq_lens[decode])
        self._metadata = LatentMetadata(
            decode_tokens=torch.from_numpy(first_tokens[decode]).to(self.config.device),
            decode_chunks=self._planner.plan(decode_rows, EveryToken()),
            rows=[self._row(forward_batch, row, int(first_tokens[row])) for row in longer.tolist()],
        )

    def _row(self, forward_batch: ForwardBatch, row: int, first_token: int) -> LatentRow:
        num_new = int(forward_batch.extend_seq_lens_cpu[row])
        seq_len = int(forward_batch.seq_lens_cpu[row])
        slot = forward_batch.req_pool_indices[row : row + 1]
        table = self.req_to_token_pool.req_to_token[:, :seq_len]
        bias = None
        if not isinstance(forward_batch.visibility, Causal):
            seen = seen_row(forward_batch, row, first_token, first_key=0)
            bias = VisibleBias(seen, forward_batch.visibility, EveryToken(), self.config.dtype)
        return LatentRow(
            first_token=first_token,
            stop_token=first_token + num_new,
            prefix_len=seq_len - num_new,
            cache_indices=table.index_select(0, slot).view(-1),
            bias=bias,
        )

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Tokens of rows without any key (padding) come out as zeros."""
        if self._metadata is None:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        if not tokens.is_saved:
            self._pool.set_latent(
                layer.layer_id, forward_batch.out_cache_loc, tokens.latent, tokens.k_rope
            )
        latents = self._pool.get_latent(layer.layer_id).flatten(0, 1)
        num_tokens, num_heads = tokens.q_nope.shape[:2]
        out = tokens.q_nope.new_zeros((num_tokens, num_heads, layer.v_head_dim))
        for row in self._metadata.rows:
            own = slice(row.first_token, row.stop_token)
            out[own] = _attend_row(row, tokens.q_nope[own], tokens.q_rope[own], latents, up, layer)
        decode = self._metadata.decode_tokens
        if len(decode):
            q = absorb_queries(tokens.q_nope[decode], tokens.q_rope[decode], up)
            attended = attend_absorbed(q, latents, self._metadata.decode_chunks, layer)
            out.index_copy_(0, decode, project_values(attended, up, out.dtype))
        return out


def _attend_row(
    row: LatentRow,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    up: UpProjections,
    layer: LatentLayer,
) -> torch.Tensor:
    """float32 (new tokens, heads, v_head_dim). Each token's state grows piece by piece.

    Latents come from the pool: what a token sees does not depend on which chunk brought it.
    """
    num_new, num_heads = q_nope.shape[:2]
    out = torch.zeros((num_new, num_heads, layer.v_head_dim), device=q_nope.device)
    lse = torch.full((num_new, num_heads), -torch.inf, device=q_nope.device)
    pays = absorbing_pays(num_new, up, layer.entry)
    keys_class = AbsorbedKeys if pays else ExpandedKeys
    for first_key, stop_key in row.pieces():
        piece = latents.index_select(0, row.cache_indices[first_key:stop_key])
        keys = keys_class(piece, up, layer, q_nope.dtype)
        for first, stop in row.query_blocks(first_key):
            hidden = row.hidden(QueryBlock(first, stop, first_key, stop_key))
            mask = None if hidden is None else hidden.to(q_nope.device)
            state = keys.attend(q_nope[first:stop], q_rope[first:stop], mask)
            block = slice(first, stop)
            merged = merge_states(AttentionState(out[block], lse[block]), state)
            out[block], lse[block] = merged
    return out


def _hidden(first: int, stop: int, first_key: int, stop_key: int) -> torch.Tensor | None:
    """Which keys at first_key .. stop_key - 1 come after which queries at first .. stop - 1:
    bool (queries, keys), or None where none does."""
    if stop_key - 1 <= first:
        return None
    return torch.arange(first_key, stop_key) > torch.arange(first, stop).unsqueeze(1)
