"""Which plans' drafts can be made ahead."""

from typing import Any

import msgspec
import numpy as np
import pytest

from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN, StepPlan, TableWrite
from workers.speculation.ahead import AheadRows, ChainsAhead, TreesAhead


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def run_plan(
    step_id: int, slots: list[int], prefix_lens: list[int], num_tokens: int, **changes: Any
) -> StepPlan:
    n = len(slots)
    new = np.full(n, num_tokens, dtype=np.int32)
    firsts = [LAST_SAMPLED_TOKEN] + [DRAFT_TOKEN] * (num_tokens - 1)
    plan = StepPlan(
        step_id=step_id,
        is_decode=num_tokens == 1,
        slots=ints(*slots),
        num_new_tokens=new,
        prefix_lens=ints(*prefix_lens),
        samples=new,
        input_ids=ints(*firsts * n),
        out_cache_loc=np.arange(100 * step_id, 100 * step_id + n * num_tokens, dtype=np.int32),
    )
    return msgspec.structs.replace(plan, **changes)


BEFORE = run_plan(1, [3, 5, 4], [10, 20, 30], 4)
NEXT = run_plan(2, [4, 3], [34, 14], 3)


def test_rows_are_those_of_the_step_before() -> None:
    ahead = AheadRows.of(NEXT, BEFORE, ChainsAhead())
    assert ahead is not None
    assert ahead.rows.tolist() == [2, 0]
    assert ahead.prefix_lens.tolist() == [30, 10]
    assert ahead.tokens_a_row == 3


@pytest.mark.parametrize(
    ("plan", "before"),
    [
        (NEXT, run_plan(1, [3, 5, 4], [10, 20, 30], 1)),
        (run_plan(2, [4, 3], [34, 14], 1), BEFORE),
        (run_plan(2, [4, 6], [34, 14], 3), BEFORE),
        (run_plan(2, [4, 3], [33, 14], 3), BEFORE),
        (NEXT, msgspec.structs.replace(BEFORE, masked_slots=ints(3))),
        (NEXT, msgspec.structs.replace(BEFORE, samples=ints(4, 4, 1))),
        (NEXT, msgspec.structs.replace(BEFORE, parents=ints(*[-1, 0, 0, 1] * 3))),
        (msgspec.structs.replace(NEXT, parents=ints(*[-1, 0, 0] * 2)), BEFORE),
        (msgspec.structs.replace(NEXT, cleared=ints(7)), BEFORE),
        (msgspec.structs.replace(NEXT, table_writes=(TableWrite(ints(4), 0, ints(1)),)), BEFORE),
        (msgspec.structs.replace(NEXT, input_ids=ints(9, -2, -2, -1, -2, -2)), BEFORE),
        (
            msgspec.structs.replace(
                NEXT,
                num_new_tokens=ints(2, 3),
                samples=ints(2, 3),
                input_ids=ints(-1, -2, -1, -2, -2),
            ),
            BEFORE,
        ),
    ],
    ids=[
        "plain before",
        "plain",
        "another request",
        "not all count as right",
        "masks",
        "a prompt",
        "a tree before",
        "a tree",
        "clears",
        "writes tables",
        "a named token",
        "uneven",
    ],
)
def test_others_wait_for_the_samples(plan: StepPlan, before: StepPlan) -> None:
    assert AheadRows.of(plan, before, ChainsAhead()) is None


TREE = ints(*[-1, 0, 0, 1] * 3)
NEXT_TREE = run_plan(2, [4, 3], [34, 14], 4)


def test_rows_of_whole_trees_go_on_from_such_rows() -> None:
    before = msgspec.structs.replace(BEFORE, parents=TREE)
    ahead = AheadRows.of(NEXT_TREE, before, TreesAhead(3))
    assert ahead is not None
    assert ahead.rows.tolist() == [2, 0]
    assert ahead.tokens_a_row == 4


@pytest.mark.parametrize(
    ("plan", "changes", "num_drafts"),
    [
        (NEXT_TREE, {}, 3),
        (NEXT_TREE, {"parents": TREE}, 4),
        (NEXT, {"parents": TREE}, 3),
        (msgspec.structs.replace(NEXT_TREE, masked_slots=ints(3)), {"parents": TREE}, 3),
        (msgspec.structs.replace(NEXT_TREE, cleared=ints(7)), {"parents": TREE}, 3),
        (NEXT_TREE, {"parents": TREE, "masked_slots": ints(3)}, 3),
    ],
    ids=["chains before", "a narrower tree", "fewer drafts", "masks", "clears", "masks before"],
)
def test_other_trees_wait_for_the_samples(
    plan: StepPlan, changes: dict[str, Any], num_drafts: int
) -> None:
    before = msgspec.structs.replace(BEFORE, **changes)
    assert AheadRows.of(plan, before, TreesAhead(num_drafts)) is None
