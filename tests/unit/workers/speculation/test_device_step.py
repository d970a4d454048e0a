"""Tokens of a step as a drafter on the rank's device sees them, whenever it asks."""

import numpy as np
import pytest
import torch

from workers.sampling.state import SamplingState
from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN, StepPlan
from workers.speculation.device_step import DeviceDrafts, DrafterStep

CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def step_of(input_ids: list[int], num_new: list[int]) -> tuple[DrafterStep, SamplingState]:
    """Rows of slots 2, 1, ..., which have sampled token 7 last, behind 4 tokens each."""
    sampling = SamplingState(4, 16, (), CPU)
    sampling.last_token_ids.fill_(7)
    plan = StepPlan(
        step_id=0,
        is_decode=max(num_new) == 1,
        slots=int32(*range(2, 2 - len(num_new), -1)),
        num_new_tokens=int32(*num_new),
        prefix_lens=int32(*[4] * len(num_new)),
        samples=int32(*num_new),
        input_ids=int32(*input_ids),
        out_cache_loc=int32(*range(20, 20 + len(input_ids))),
    )
    return DrafterStep(plan, sampling, torch.zeros(4, 16, dtype=torch.int32)), sampling


def test_a_token_that_the_host_does_not_know_is_what_stood_before_the_step() -> None:
    """By the time a head reads the step's tokens, its slots have sampled others."""
    step, sampling = step_of([LAST_SAMPLED_TOKEN, 5], [1, 1])
    sampling.last_token_ids.fill_(9)
    assert step.ids.tolist() == [7, 5]


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_drafts_stand_where_the_plan_left_room_for_them(is_asked_before: bool) -> None:
    step, _ = step_of([3, DRAFT_TOKEN, 5, 6, DRAFT_TOKEN, DRAFT_TOKEN], [2, 1, 3])
    if is_asked_before:
        assert step.ids[[0, 2, 3]].tolist() == [3, 5, 6]
    step.name(DeviceDrafts(torch.tensor([[11, 0], [12, 13]])))
    assert step.even_drafts is None
    assert step.ids.tolist() == [3, 11, 5, 6, 12, 13]
    assert step.out_cache_loc.tolist() == [20, 21, 22, 23, 24, 25]


def test_rows_of_as_many_drafts_need_nothing_but_these() -> None:
    step, _ = step_of([3, DRAFT_TOKEN, 5, DRAFT_TOKEN], [2, 2])
    drafts = torch.tensor([[11], [12]])
    step.name(DeviceDrafts(drafts))
    assert step.even_drafts is drafts
    assert step.ids.tolist() == [3, 11, 5, 12]


def test_drafts_of_a_wider_step_are_named_in_a_part_of_it() -> None:
    step, _ = step_of([3, DRAFT_TOKEN, 5, DRAFT_TOKEN], [2, 2])
    step.name(DeviceDrafts(torch.tensor([[11, 1], [12, 2]])))
    assert step.even_drafts is None
    assert step.ids.tolist() == [3, 11, 5, 12]


def test_the_table_learns_where_tokens_go() -> None:
    step, _ = step_of([3, DRAFT_TOKEN, 5], [2, 1])
    step.place_tokens()
    assert step._table[2, 4:6].tolist() == [20, 21]
    assert step._table[1, 4:6].tolist() == [22, 0]
