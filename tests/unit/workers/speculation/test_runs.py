"""How much of a run holds, and where its tokens stand."""

import msgspec
import numpy as np
import pytest
import torch

from workers.sampling.state import SampledTokens
from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN, NAN_TOKEN, StepPlan
from workers.speculation.chain import ChainVerifier, HostChainVerifier
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts
from workers.speculation.runs import HostRuns, SampledRuns
from workers.speculation.verifier import NO_SAMPLE

FIRST = np.array([0])
"""Of one row's samples."""


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("token_ids", "input_ids", "num_samples", "run_lens"),
    [
        # Every draft is right, none is, the second is not.
        ([5, 6, 7], [4, 5, 6], [3], [3]),
        ([5, 6, 7], [4, 9, 6], [3], [1]),
        ([5, 6, 7], [4, 5, 9], [3], [2]),
        # One that is right behind a wrong one is not.
        ([5, 6, 7, 8], [4, 9, 6, 7], [4], [1]),
        # Rows of any number of samples; what follows a row's last sample is another row's.
        ([5, 5, 6, 7], [4, 5, 5, 9], [1, 3], [1, 2]),
        ([5, 6, 1, 8, 9], [4, 5, 6, 0, 8], [2, 1, 2], [2, 1, 2]),
    ],
)
def test_a_run_holds_up_to_the_first_wrong_draft(
    token_ids: list[int], input_ids: list[int], num_samples: list[int], run_lens: list[int]
):
    found = ChainVerifier().accept(
        torch.tensor(token_ids), torch.tensor(input_ids), int32(*num_samples)
    )
    assert found.tolist() == run_lens
    assert found.dtype == torch.int64
    starts = np.cumsum(num_samples) - num_samples
    expected = int32(*input_ids[1:], NO_SAMPLE)
    expected[starts[1:] - 1] = NO_SAMPLE
    on_host = HostChainVerifier().accept(int32(*token_ids), expected, starts)
    assert on_host.tolist() == run_lens


def test_only_what_holds_is_told_to_the_host():
    sampled = SampledRuns(
        torch.tensor([5, 6, 7, 8, 9]),
        torch.tensor([False, True, False, True, False]),
        None,
        torch.tensor([2, 1]),
        int32(3, 2),
    )
    result = sampled.start_download().read()
    assert result.token_ids.tolist() == [5, NAN_TOKEN, NAN_TOKEN]
    assert result.run_lens.tolist() == [2, 1]
    assert result.num_drafts.tolist() == [2, 1]
    plain = SampledTokens(sampled.token_ids, sampled.has_nan, None).read()
    assert plain.token_ids.tolist() == [5, NAN_TOKEN, 7, NAN_TOKEN, 9]


class CountingProposer:
    """Drafts 100, 101, ... behind a text of any length, num_known at most; remembers the lengths
    that it was asked for."""

    def __init__(self, num_known: int = 9) -> None:
        self.lens: list[list[int]] = []
        self._num_known = num_known

    def admit(self, requests: object) -> None: ...

    def observe(self, step: object) -> None: ...

    def propose(self, rows: DraftRows) -> Drafts:
        self.lens.append(rows.lens.tolist())
        drafts = (100 + torch.arange(rows.width)).expand(len(rows.slots), -1)
        return Drafts(drafts, np.minimum(rows.max_drafts, np.int32(self._num_known)))


def runs_of(proposer: CountingProposer) -> tuple[HostRuns, torch.Tensor, TokenHistory]:
    """Of two slots, with their table and their tokens."""
    table, history = torch.zeros(2, 32, dtype=torch.int32), TokenHistory(2, 32, torch.device("cpu"))
    return HostRuns(table, history, proposer), table, history


def plan_of(bound: int, first_page_place: int) -> StepPlan:
    """Slot 1 with three drafts behind its bound, slot 0 with two tokens of a prompt."""
    return StepPlan(
        step_id=1,
        is_decode=False,
        slots=int32(1, 0),
        num_new_tokens=int32(4, 2),
        prefix_lens=int32(bound, 3),
        samples=int32(4, 0),
        input_ids=int32(LAST_SAMPLED_TOKEN, *[DRAFT_TOKEN] * 3, 8, 9),
        out_cache_loc=int32(*range(first_page_place, first_page_place + 4), 60, 61),
    )


def test_a_plans_upper_bounds_become_true_lengths():
    proposer = CountingProposer()
    runs, table, history = runs_of(proposer)
    table[1, :10] = torch.arange(40, 50)
    runs.take_in(int32(1), int32(10), int32(5), np.array([1]), FIRST)
    first = runs.exact(plan_of(10, 20))
    assert first.prefix_lens.tolist() == [10, 3]
    assert first.input_ids.tolist() == [LAST_SAMPLED_TOKEN, 100, 101, 102, 8, 9]
    assert first.out_cache_loc.tolist() == [20, 21, 22, 23, 60, 61]
    positions = int32(11, 12, 13, 14)
    runs.take_in(int32(1, 1, 1, 1), positions, np.arange(4), np.array([2]), FIRST)
    # Two drafts were wrong, which the plan does not know.
    second = runs.exact(plan_of(14, 24))
    assert second.prefix_lens.tolist() == [12, 3]
    assert second.out_cache_loc.tolist() == [22, 23, 24, 25, 60, 61]
    assert proposer.lens == [[11], [13]]
    assert history.token_ids[1, 10:15].tolist() == [5, 0, 1, 2, 3]
    # Pages of the upper bound are there for the step after that.
    assert table[1, 14:18].tolist() == [24, 25, 26, 27]


@pytest.mark.parametrize("num_known", [0, 2])
def test_a_row_has_no_more_drafts_than_its_proposer_knows(num_known: int):
    runs, table, _ = runs_of(CountingProposer(num_known))
    runs.take_in(int32(1), int32(10), int32(5), np.array([1]), FIRST)
    plan = runs.exact(plan_of(10, 20))
    length = 1 + num_known
    assert plan.num_new_tokens.tolist() == [length, 2]
    assert plan.samples.tolist() == [length, 0]
    assert plan.input_ids.tolist() == [LAST_SAMPLED_TOKEN, *range(100, 100 + num_known), 8, 9]
    assert plan.out_cache_loc.tolist() == [*range(20, 20 + length), 60, 61]
    assert not plan.is_decode
    # The table knows the places of the upper bound all the same.
    assert table[1, 10:14].tolist() == [20, 21, 22, 23]


def test_a_plan_without_such_rows_is_left_alone():
    runs, _, _ = runs_of(CountingProposer())
    plan = msgspec.structs.replace(plan_of(10, 20), samples=int32(0, 0), input_ids=int32(*range(6)))
    assert runs.exact(plan) is plan


def test_a_row_whose_last_token_is_named_has_its_planned_length_and_drafts():
    """What its slot sampled last is nobody's: the row runs again."""
    runs, _, _ = runs_of(CountingProposer())
    runs.take_in(int32(1), int32(11), int32(5), np.array([1]), FIRST)
    named = msgspec.structs.replace(plan_of(10, 20), input_ids=int32(77, *[DRAFT_TOKEN] * 3, 8, 9))
    plan = runs.exact(named)
    assert plan.prefix_lens.tolist() == [10, 3]
    assert plan.input_ids.tolist() == [77, 100, 101, 102, 8, 9]


def test_a_prompts_length_is_known_whatever_becomes_of_its_row():
    """A row that failed is never taken in; the slot's next row must not go on from its old one."""
    runs, _, _ = runs_of(CountingProposer())
    runs.take_in(int32(1), int32(25), int32(5), np.array([1]), FIRST)
    prompt = msgspec.structs.replace(
        plan_of(4, 20), samples=int32(0, 0), input_ids=int32(*range(6)), prefix_lens=int32(4, 3)
    )
    runs.exact(prompt)
    assert runs.exact(plan_of(8, 24)).prefix_lens.tolist() == [8, 3]
