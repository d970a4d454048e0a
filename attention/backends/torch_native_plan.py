"""A step as the torch_native backend runs it: its decode rows, and the keys of each kind of layer.

Planned once per step from host copies of lengths and the request table. Knows no K, V or layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.backends.torch_native_cross import CrossPlanner
from attention.backends.torch_native_rows import (
    ExtendRow,
    LayerPlan,
    StepRows,
    decode_planner,
    seen_row,
)
from attention.config import AttentionConfig, LayerKind
from attention.forward_batch import ForwardBatch
from attention.kernels.torch_decode import SingleTokenRows
from attention.kernels.torch_extend import all_key_blocks, query_blocks
from attention.kernels.torch_visible import VisibleBias
from attention.memory.layout import FixedLength, Retention
from attention.visibility import Causal, Items


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
        self._device, self._dtype = config.device, config.dtype
        self._tables = tuple(tables)
        self._retentions = {
            kind: kind.retention
            for kind in config.num_layers_by_kind
            if not isinstance(kind.retention, FixedLength)
        }
        self._decode = {
            (heads, account): decode_planner(
                heads, self._tables[account], num_cache_slots[account], max_chunk_key_bytes
            )
            for _, heads, account in self._retentions
        }
        # One account is the encoder's, if there is one: the last.
        cross_kinds = [kind for kind in config.num_layers_by_kind if kind not in self._retentions]
        last = self._tables[-1], num_cache_slots[-1]
        self._cross = [CrossPlanner(cross_kinds, *last, max_chunk_key_bytes)] if cross_kinds else []

    def plan(self, forward_batch: ForwardBatch) -> TorchNativeMetadata:
        """No device-to-host copy happens here."""
        num_new = forward_batch.extend_seq_lens_cpu.astype(np.int64)
        seq_lens = forward_batch.seq_lens_cpu.astype(np.int64)
        first_tokens = np.cumsum(num_new) - num_new
        decode, extend = forward_batch.decode_rows()
        slots = forward_batch.req_pool_indices[torch.from_numpy(decode).to(self._device)]
        decode_tokens = first_tokens[decode]
        num_tokens = forward_batch.num_tokens
        starts = {row: int(first_tokens[row]) for row in extend.tolist()}
        rows = StepRows(forward_batch, decode, slots, starts)
        plans = self._plan_layers(rows, SingleTokenRows(slots, seq_lens[decode]))
        for cross in self._cross:
            plans |= cross.plan(rows, forward_batch.encoder_lens_cpu)
        return TorchNativeMetadata(
            decode_tokens=torch.from_numpy(decode_tokens).to(self._device),
            is_plain_decode=np.array_equal(decode_tokens, np.arange(num_tokens)),
            has_keyless=len(decode) + int(num_new[extend].sum()) != num_tokens,
            plans=plans,
        )

    def _plan_layers(
        self, rows: StepRows, decode_rows: SingleTokenRows
    ) -> dict[LayerKind, LayerPlan]:
        """Of the layers that see the rows' own tokens."""
        extend_rows = {
            (retention, account): [
                self._extend_row(rows, row, first_token, retention, account)
                for row, first_token in rows.extend_starts.items()
            ]
            for retention, account in {(r, kind.account) for kind, r in self._retentions.items()}
        }
        return {
            kind: LayerPlan(
                self._decode[kind.heads, kind.account].plan(decode_rows, retention),
                extend_rows[retention, kind.account],
            )
            for kind, retention in self._retentions.items()
        }

    def _extend_row(
        self, rows: StepRows, row: int, first_token: int, retention: Retention, account: int
    ) -> ExtendRow:
        num_new, seq_len = rows.num_new(row), int(rows.batch.seq_lens_cpu[row])
        visibility = rows.batch.visibility
        # Tokens of an item stand before their places: a shared prefix stays in sight of them.
        is_whole = isinstance(visibility, Items)
        first_key = 0 if is_whole else retention.first_visible(seq_len - num_new)
        table = self._tables[account][:, first_key:seq_len]
        whole = ExtendRow(
            first_token=first_token,
            stop_token=first_token + num_new,
            cache_indices=table.index_select(0, rows.slot(row)).view(-1),
            blocks=tuple(query_blocks(num_new, seq_len - first_key, retention)),
        )
        if isinstance(visibility, Causal):
            return whole
        seen = seen_row(rows.batch, row, first_token, first_key)
        return replace(
            whole,
            blocks=tuple(all_key_blocks(num_new, seq_len - first_key)),
            bias=VisibleBias(seen, visibility, retention, self._dtype),
        )
