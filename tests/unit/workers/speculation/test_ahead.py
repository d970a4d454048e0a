"""Which plans' drafts can be made ahead, and what the device makes of them without the host."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN, StepPlan, TableWrite
from workers.speculation.ahead import AheadRows, DrawnRows, HeldChains, going_on
from workers.speculation.chain import HostChainVerifier
from workers.speculation.verifier import NO_SAMPLE

CPU = torch.device("cpu")


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
    ahead = AheadRows.of(NEXT, BEFORE)
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
    assert AheadRows.of(plan, before) is None


def drawn_rows(rng: np.random.Generator, num_rows: int, num_tokens: int) -> DrawnRows:
    """Of so few tokens that many drafts are right."""
    sampled = torch.from_numpy(rng.integers(0, 2, (num_rows, num_tokens)))
    drafts = torch.from_numpy(rng.integers(0, 2, (num_rows, num_tokens - 1)))
    return DrawnRows(drafts, sampled)


def test_what_holds_is_what_the_host_says() -> None:
    drawn = drawn_rows(np.random.default_rng(0), 64, 5)
    ends = torch.full((64, 1), NO_SAMPLE)
    to_be = torch.cat([drawn.drafts, ends], dim=1)
    expected = HostChainVerifier().accept(
        drawn.sampled.flatten().int().numpy(), to_be.flatten().int().numpy(), np.arange(64) * 5
    )
    found = HeldChains().run_lens(drawn)
    assert found.tolist() == expected.tolist()
    assert set(found.tolist()) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("first", [0, 1])
def test_rows_go_on_where_they_would_once_the_host_knows(first: int) -> None:
    """first: the text's position that the table begins with."""
    rng = np.random.default_rng(1)
    ahead = AheadRows.of(NEXT, BEFORE)
    assert ahead is not None
    for _ in range(20):
        table = torch.from_numpy(rng.integers(1000, 2000, (8, 64), dtype=np.int32))
        drawn = drawn_rows(rng, 3, 4)
        drawn.sampled[0, :] = torch.tensor([0, -1, -1, -1])
        run_lens = HeldChains().run_lens(drawn)
        rows = going_on(ahead, drawn, run_lens, table, first)
        places = NEXT.out_cache_loc.reshape(2, 3)
        for row, (slot, was, bound) in enumerate([(4, 2, 34), (3, 0, 14)]):
            held = int(run_lens[was])
            start = int(BEFORE.prefix_lens[was]) + held
            assert rows.prefix_lens[row] == start
            # No number has no embedding: any other stands for it.
            assert rows.last_ids[row] == max(int(drawn.sampled[was, held - 1]), 0)
            own = table[slot]
            assert own[bound - first :][:3].tolist() == places[row].tolist()
            assert rows.places[:, row].tolist() == own[start - first :][:3].tolist()
