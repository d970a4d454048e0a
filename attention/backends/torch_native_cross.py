"""Cross-attention in a step of the torch_native backend: what an encoder made, seen by every query.

The rows of a step are those of the other layers; only their keys differ: all that the row's encoder
made, by the encoder account's table. Knows no K, V or layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.torch_native_rows import ExtendRow, LayerPlan, StepRows, decode_planner
from attention.config import LayerKind
from attention.kernels.torch_decode import SingleTokenRows
from attention.kernels.torch_extend import all_key_blocks
from attention.memory.layout import EveryToken


class CrossPlanner:
    """Plans the layers that see an encoder's tokens.

    table: int32 (slots, tokens), cache indices of each slot's encoder. max_chunk_key_bytes: as
    TorchNativePlanner has it.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        table: torch.Tensor,
        num_cache_slots: int,
        max_chunk_key_bytes: int,
    ) -> None:
        self._table = table
        self._decode = {
            kind: decode_planner(kind.heads, table, num_cache_slots, max_chunk_key_bytes)
            for kind in kinds
        }

    def plan(
        self, rows: StepRows, encoder_lens: npt.NDArray[np.int32]
    ) -> dict[LayerKind, LayerPlan]:
        """encoder_lens: int32 (bs,), at least 1 each."""
        lens = encoder_lens.astype(np.int64)
        decode = SingleTokenRows(rows.decode_slots, lens[rows.decode])
        extend = [
            self._extend_row(rows, row, first_token, int(lens[row]))
            for row, first_token in rows.extend_starts.items()
        ]
        return {
            kind: LayerPlan(
                # As many tokens as there are and the last one sees them all.
                planner.plan(decode, EveryToken()),
                extend,
            )
            for kind, planner in self._decode.items()
        }

    def _extend_row(self, rows: StepRows, row: int, first_token: int, num_keys: int) -> ExtendRow:
        num_new = rows.num_new(row)
        indices = self._table[:, :num_keys].index_select(0, rows.slot(row))
        blocks = tuple(all_key_blocks(num_new, num_keys))
        return ExtendRow(first_token, first_token + num_new, indices.view(-1), blocks)
