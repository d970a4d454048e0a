"""Results of steps that no device ran: every value is a number. Part of benchmarks of the host."""

import numpy as np

from workers.kv_cache.radix_node import IntArray
from workers.scheduler.plan import StepPlan, StepResult


def result_of(plan: StepPlan, token_id: int = 7) -> StepResult:
    """Every sampling row draws token_id."""
    return result_with(plan, np.full(int(plan.samples.sum()), token_id, dtype=np.int32))


def result_with(plan: StepPlan, token_ids: IntArray) -> StepResult:
    """token_ids: int32 (num sampling rows,)."""
    num_unfinished = plan.batch_size - len(token_ids)
    return StepResult(token_ids, chunk_has_nan=(False,) * num_unfinished)
