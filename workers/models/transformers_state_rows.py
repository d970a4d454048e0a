"""Rows of a step for modules that keep a state: put together, and cut where a state is wanted.

Knows rows, tokens and slots; no module and no state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention import ForwardBatch
from attention.memory.slot_states import SnapshotOfRow
from workers.models.transformers_row_groups import RowGroup, row_groups
from workers.sampling.transfer import upload

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
    slot's previous owner. Waits for no device."""
    wanted_of: _Wanted = {}
    for row, num_tokens, snapshot in wanted:
        wanted_of.setdefault(row, {})[num_tokens] = snapshot
    lengths = batch.extend_seq_lens_cpu.tolist()
    prefix_lens = batch.extend_prefix_lens_cpu.tolist()
    kinds: list[_Kind] = [
        (prefix_len == 0, tuple(sorted(cut for cut in wanted_of.get(row, ()) if cut < length)))
        for row, (length, prefix_len) in enumerate(zip(lengths, prefix_lens, strict=True))
    ]
    groups = row_groups(batch, kinds)
    pieces_of_groups = _pieces_of(groups, wanted_of, batch.req_pool_indices.device)
    return [
        StateRows(group.slots, group.kind[0], pieces)
        for group, pieces in zip(groups, pieces_of_groups, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tokens start to stop of each of a group's rows. kept: (index of a row in the group, snapshot
    that gets its state) each."""

    start: int
    stop: int
    kept: tuple[tuple[int, int], ...]


def _pieces_of(
    groups: Sequence[RowGroup[_Kind]], wanted_of: _Wanted, device: torch.device
) -> Iterator[tuple[StatePiece, ...]]:
    """Of each group. One upload for all that is kept, and none where nothing is."""
    cuts = [tuple(_cuts_of(group, wanted_of)) for group in groups]
    kept = [pair for of_group in cuts for cut in of_group for pair in cut.kept]
    pairs = np.array(kept, dtype=np.int64).reshape(-1, 2)
    rows, snapshots = (
        upload([pairs[:, 0], pairs[:, 1]], device)
        if kept
        else torch.empty((2, 0), dtype=torch.int64, device=device)
    )
    sizes = [len(cut.kept) for of_group in cuts for cut in of_group]
    by_cut = zip(torch.split(rows, sizes), torch.split(snapshots, sizes), strict=True)
    for group, of_group in zip(groups, cuts, strict=True):
        yield tuple(
            StatePiece(group.tokens[:, cut.start : cut.stop], *next(by_cut)) for cut in of_group
        )


def _cuts_of(group: RowGroup[_Kind], wanted_of: _Wanted) -> Iterator[_Cut]:
    _, cuts = group.kind
    start = 0
    for stop in (*cuts, group.tokens.shape[1]):
        kept = tuple(
            (index, wanted_of[row][stop])
            for index, row in enumerate(group.rows)
            if stop in wanted_of.get(row, ())
        )
        yield _Cut(start, stop, kept)
        start = stop
