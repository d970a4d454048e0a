"""A step as the torch_native backend runs it: its decode rows, and the keys of each kind of layer.

Planned once per step from host copies of lengths and the request table. Knows no K, V or layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention.config import AttentionConfig, AttentionHeads, LayerKind
from attention.forward_batch import ForwardBatch
from attention.kernels.torch_decode import DecodeChunk, DecodePlanner, DecodeRows
from attention.kernels.torch_extend import QueryBlock, query_blocks
from attention.memory.layout import Retention


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A row with several new tokens, first_token .. stop_token - 1 of the step.

    cache_indices: int32 (m,), the row's keys that any of its queries sees, oldest first.
    """

    first_token: int
    stop_token: int
    cache_indices: torch.Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A step as layers of one kind see it."""

    decode_chunks: list[DecodeChunk]
    extend_rows: list[ExtendRow]


@dataclass(frozen=True, slots=True)
class TorchNativeMetadata:
    """A step: its decode queries and a plan for each kind of layer that the model has.

    decode_tokens: int64 (n,), the decode queries among the step's new tokens, in planned order.
    is_plain_decode: every new token is a decode query, and they come in planned order.
    has_keyless: some token sees no key at all (a padding row): its output is zero.
    """

    decode_tokens: torch.Tensor
    is_plain_decode: bool
    has_keyless: bool
    plans: dict[LayerKind, LayerPlan]


class TorchNativePlanner:
    """Plans steps for the layers of one model.

    max_chunk_key_bytes: of the float32 keys that a decode chunk gathers at a time.
    """

    def __init__(
        self,
        config: AttentionConfig,
        tables: Sequence[torch.Tensor],
        num_cache_slots: Sequence[int],
        max_chunk_key_bytes: int,
    ) -> None:
        """tables, num_cache_slots: of each account, its table of requests and its tokens."""
        self._device = config.device
        self._tables = tuple(tables)
        self._kinds = tuple(config.num_layers_by_kind)
        self._max_chunk_key_bytes = max_chunk_key_bytes
        self._decode = {
            (heads, account): DecodePlanner(
                self._tables[account],
                num_cache_slots[account],
                q_heads=heads.tp_q_head_num,
                kv_heads=heads.tp_k_head_num,
            )
            for _, heads, account in self._kinds
        }

    def plan(self, forward_batch: ForwardBatch) -> TorchNativeMetadata:
        """No device-to-host copy happens here."""
        num_new = forward_batch.extend_seq_lens_cpu.astype(np.int64)
        seq_lens = forward_batch.seq_lens_cpu.astype(np.int64)
        first_tokens = np.cumsum(num_new) - num_new
        decode = np.flatnonzero((num_new == 1) & (seq_lens > 0))
        decode = decode[np.argsort(-seq_lens[decode], kind="stable")]
        extend = np.flatnonzero(num_new > 1)
        rows = torch.from_numpy(decode).to(self._device)
        decode_rows = DecodeRows(forward_batch.req_pool_indices[rows], seq_lens[decode])
        decode_tokens = first_tokens[decode]
        num_tokens = forward_batch.num_tokens
        starts = {row: int(first_tokens[row]) for row in extend.tolist()}
        return TorchNativeMetadata(
            decode_tokens=torch.from_numpy(decode_tokens).to(self._device),
            is_plain_decode=np.array_equal(decode_tokens, np.arange(num_tokens)),
            has_keyless=len(decode) + int(num_new[extend].sum()) != num_tokens,
            plans=self._plan_layers(forward_batch, decode_rows, starts),
        )

    def _plan_layers(
        self, forward_batch: ForwardBatch, decode_rows: DecodeRows, starts: dict[int, int]
    ) -> dict[LayerKind, LayerPlan]:
        """starts: the first token of each row with several new ones."""
        extend_rows = {
            (retention, account): [
                self._extend_row(forward_batch, row, first_token, retention, account)
                for row, first_token in starts.items()
            ]
            for retention, account in {(kind.retention, kind.account) for kind in self._kinds}
        }
        return {
            kind: LayerPlan(
                self._decode_chunks(decode_rows, kind), extend_rows[kind.retention, kind.account]
            )
            for kind in self._kinds
        }

    def _decode_chunks(self, rows: DecodeRows, kind: LayerKind) -> list[DecodeChunk]:
        max_tokens = max(1, self._max_chunk_key_bytes // _key_bytes(kind.heads))
        planner = self._decode[kind.heads, kind.account]
        return planner.plan(rows, kind.retention, max_tokens)

    def _extend_row(
        self,
        forward_batch: ForwardBatch,
        row: int,
        first_token: int,
        retention: Retention,
        account: int,
    ) -> ExtendRow:
        num_new = int(forward_batch.extend_seq_lens_cpu[row])
        seq_len = int(forward_batch.seq_lens_cpu[row])
        first_key = retention.first_visible(seq_len - num_new)
        table = self._tables[account][:, first_key:seq_len]
        slot = forward_batch.req_pool_indices[row : row + 1]
        return ExtendRow(
            first_token=first_token,
            stop_token=first_token + num_new,
            cache_indices=table.index_select(0, slot).view(-1),
            blocks=tuple(query_blocks(num_new, seq_len - first_key, retention)),
        )


def _key_bytes(heads: AttentionHeads) -> int:
    return heads.tp_k_head_num * heads.head_dim * torch.float32.itemsize
