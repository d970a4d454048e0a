"""Rows of a flat batch that one call of a model's code can take together. Knows no model."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from attention import ForwardBatch

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RowGroup(Generic[Kind]):
    """Rows of one kind that bring as many new tokens each.

    tokens: int64 (rows, length), positions in the flat batch. slots: int64 (rows,). rows: their
    places in the batch.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    kind: Kind
    rows: tuple[int, ...]


def row_groups(batch: ForwardBatch, kinds: Sequence[Kind]) -> list[RowGroup[Kind]]:
    """Every row of the batch in one group. kinds: one a row."""
    stops = np.cumsum(batch.extend_seq_lens_cpu)
    rows: dict[tuple[int, Kind], list[int]] = {}
    for row, length in enumerate(batch.extend_seq_lens_cpu.tolist()):
        rows.setdefault((length, kinds[row]), []).append(row)
    device = batch.req_pool_indices.device
    groups = []
    for (length, kind), own in rows.items():
        tokens = stops[own, None] - length + np.arange(length)
        slots = batch.req_pool_indices[torch.tensor(own, device=device)]
        groups.append(RowGroup(torch.from_numpy(tokens).to(device), slots, kind, tuple(own)))
    return groups
