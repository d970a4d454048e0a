"""Rows of a flat batch that one call of a model's code can take together. Knows no model."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from attention import ForwardBatch
from workers.sampling.transfer import upload

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
    """Every row of the batch in one group. kinds: one a row. Waits for no device."""
    stops = np.cumsum(batch.extend_seq_lens_cpu)
    rows: dict[tuple[int, Kind], list[int]] = {}
    for row, length in enumerate(batch.extend_seq_lens_cpu.tolist()):
        rows.setdefault((length, kinds[row]), []).append(row)
    tokens = [stops[own, None] - length + np.arange(length) for (length, _), own in rows.items()]
    places = [np.array(own, dtype=np.int64) for own in rows.values()]
    on_device = upload([*tokens, *places], batch.req_pool_indices.device)
    return [
        RowGroup(of_group, batch.req_pool_indices.index_select(0, own_places), kind, tuple(own))
        for ((_, kind), own), of_group, own_places in zip(
            rows.items(), on_device[: len(rows)], on_device[len(rows) :], strict=True
        )
    ]
