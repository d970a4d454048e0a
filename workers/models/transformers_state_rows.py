"""Rows of a step for modules that keep a state: put together, and cut where a state is wanted.

Knows rows, tokens and slots; no module and no state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attention import ForwardBatch
from attention.memory.slot_states import SnapshotOfRow
from workers.models.transformers_row_groups import RowGroup, row_groups

_Wanted = dict[int, dict[int, int]]
"""By row, and then by the number of its new tokens: the snapshot that gets the state."""
_Kind = tuple[bool, tuple[int, ...]]
"""Whether a row is fresh, and where it is cut."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """New tokens that rows compute in one go. tokens: int64 (rows, length), positions in the flat
    batch. rows int64 (n,): those whose state after these tokens goes to snapshots int64 (n,).
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    snapshots: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Equally long rows, all with a state or all fresh, that are cut alike. slots: int64 (rows,).
    pieces: in order."""

    slots: torch.Tensor
    is_fresh: bool
    pieces: tuple[StatePiece, ...]


def state_rows(batch: ForwardBatch, wanted: Sequence[SnapshotOfRow] = ()) -> list[StateRows]:
    """Every row of the batch once. A row without a prefix is fresh: what its slot holds is of the
    slot's previous owner."""
    wanted_of: _Wanted = {}
    for row, num_tokens, snapshot in wanted:
        wanted_of.setdefault(row, {})[num_tokens] = snapshot
    lengths = batch.extend_seq_lens_cpu.tolist()
    prefix_lens = batch.extend_prefix_lens_cpu.tolist()
    kinds: list[_Kind] = [
        (prefix_len == 0, tuple(sorted(cut for cut in wanted_of.get(row, ()) if cut < length)))
        for row, (length, prefix_len) in enumerate(zip(lengths, prefix_lens, strict=True))
    ]
    return [
        StateRows(group.slots, group.kind[0], tuple(_pieces(group, wanted_of)))
        for group in row_groups(batch, kinds)
    ]


def _pieces(group: RowGroup[_Kind], wanted_of: _Wanted) -> Iterator[StatePiece]:
    _, cuts = group.kind
    start = 0
    for stop in (*cuts, group.tokens.shape[1]):
        kept = [
            (index, wanted_of[row][stop])
            for index, row in enumerate(group.rows)
            if stop in wanted_of.get(row, ())
        ]
        indices = torch.tensor(kept, dtype=torch.int64, device=group.tokens.device)
        rows, snapshots = indices.view(-1, 2).unbind(1)
        yield StatePiece(group.tokens[:, start:stop], rows, snapshots)
        start = stop
