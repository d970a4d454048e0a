"""Final states to what is pooled of each row, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.pooling.params import Pooling
from workers.pooling.vectors import FloatArray
from workers.sampling.transfer import start_download
from workers.scheduler.plan import PooledRow, StepPlan


@dataclass(frozen=True, slots=True)
class PooledStates:
    """rows: of the plan. vectors: float32 (len(rows), hidden_size), on their way to the host."""

    rows: tuple[int, ...]
    vectors: torch.Tensor

    def read(self) -> tuple[tuple[int, FloatArray], ...]:
        """Row and vector of each. The device must have passed the step."""
        return tuple(zip(self.rows, self.vectors.numpy(), strict=True))


def needs_all_states(pooled: Sequence[PooledRow]) -> bool:
    return any(row.method is Pooling.MEAN for row in pooled)


def pool_states(plan: StepPlan, every: torch.Tensor, unfinished: torch.Tensor) -> PooledStates:
    """every: final states (num_tokens, hidden_size), read where needs_all_states only.
    unfinished: (n, hidden_size), of the last token of each row that samples nothing, in order."""
    order = np.cumsum(plan.samples == 0) - 1
    stops = np.cumsum(plan.num_new_tokens)
    vectors = [
        unfinished[int(order[row.row])].float()
        if row.method is Pooling.LAST
        else every[int(stops[row.row] - plan.num_new_tokens[row.row]) : int(stops[row.row])].sum(
            dim=0, dtype=torch.float32
        )
        for row in plan.pooled
    ]
    return PooledStates(tuple(row.row for row in plan.pooled), start_download(torch.stack(vectors)))
