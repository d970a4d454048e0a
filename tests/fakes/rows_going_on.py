"""Rows that go on from those of a step before, as DraftGraphs stages them."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from workers.graphs.draft_rows import FIRST_PLACES, IDS, IS_ROW, POSITIONS, SLOTS, DrawnRows


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Two rows of three tokens, of slots 4 and 3, in a graph of four; the step before had three of
    four. Of so few tokens that many drafts are right."""

    staged: torch.Tensor
    rows_before: DrawnRows
    table: torch.Tensor

    @classmethod
    def drawn(cls, rng: np.random.Generator, is_told: bool, device: torch.device) -> Self:
        """is_told: what holds is said, not found out."""
        drafts, sampled = rng.integers(0, 2, (3, 3)), rng.integers(-1, 2, (3, 4), dtype=np.int32)
        lens = torch.from_numpy(rng.integers(1, 5, 3)).to(device) if is_told else None
        staged = np.zeros((FIRST_PLACES + 3, 4), dtype=np.int64)
        staged[SLOTS] = 4, 3, 7, 7
        staged[POSITIONS] = 30, 10, 0, 0
        staged[IS_ROW] = 1, 1, 0, 0
        staged[IDS] = 2, 0, 0, 0
        staged[FIRST_PLACES:, :2] = rng.integers(2000, 3000, (3, 2))
        table = rng.integers(1000, 2000, (8, 64), dtype=np.int32)
        on_device = [torch.from_numpy(one).to(device) for one in (staged, drafts, sampled, table)]
        staged_there, drafts_there, sampled_there, table_there = on_device
        return cls(staged_there, DrawnRows(drafts_there, sampled_there, lens), table_there)
