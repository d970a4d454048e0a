"""What an executor of drafts waits for, and what it tells whom."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from workers.runner.drafting_executor import DraftingExecutor
from workers.runner.executor import StepOutcome
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import (
    DRAFT_TOKEN,
    LAST_SAMPLED_TOKEN,
    NAN_TOKEN,
    AdmittedRequest,
    StepPlan,
    StepResult,
    make_plan_decoder,
    make_plan_encoder,
)
from workers.speculation.chain import HostChainVerifier
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.runs import HostRuns


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class LaunchedStep:
    """Ends after a second, with what it was given."""

    plan: StepPlan
    number: int
    own: StepResult | None = None
    num_awaited: int = 0

    def result(self) -> StepResult:
        assert self.own is not None, f"step {self.number} was awaited"
        self.num_awaited += 1
        return self.own

    def outcome(self) -> StepOutcome:
        return StepOutcome(self.result(), self.number + 0.25, self.number + 1.0, ())


@dataclass
class Device:
    """A StepExecutor that remembers what it launched, as ranks would be sent it."""

    steps: list[LaunchedStep] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        sent = make_plan_decoder().decode(make_plan_encoder().encode(plan))
        self.steps.append(LaunchedStep(sent, len(self.steps)))
        return self.steps[-1]


@dataclass
class OneTokenProposer:
    """Drafts the same token; remembers what it was told."""

    token_id: int = 50
    observed: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)

    def admit(self, requests: object) -> None: ...

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = torch.full((len(rows.slots), rows.width), self.token_id)
        return Drafts(drafts, rows.max_drafts)

    def observe(self, step: ObservedStep) -> None:
        told = (step.prefix_lens + step.num_held.numpy()).tolist()
        self.observed.append((step.slots.tolist(), told, step.next_ids.tolist()))


class Rig:
    """Slots 0 and 1, each with a prompt of 3 tokens."""

    def __init__(self) -> None:
        self.device, self.proposer = Device(), OneTokenProposer()
        self.history = TokenHistory(3, 32, torch.device("cpu"))
        table = torch.zeros(3, 32, dtype=torch.int32)
        self.executor = DraftingExecutor(
            self.device,  # type: ignore[arg-type]
            HostRuns(table, self.history, self.proposer),
            self.proposer,
            HostChainVerifier(),
        )

    def prompts(self, *slots: int):
        n = len(slots)
        admitted = tuple(
            AdmittedRequest(slot, 0, SamplingParams(), 3, known_ids=int32(1, 2, 3))
            for slot in slots
        )
        return self.executor.launch(
            StepPlan(
                step_id=0,
                is_decode=False,
                slots=int32(*slots),
                num_new_tokens=int32(*[3] * n),
                prefix_lens=int32(*[0] * n),
                samples=int32(*[1] * n),
                input_ids=int32(*[1, 2, 3] * n),
                out_cache_loc=int32(*range(3 * n)),
                admitted=admitted,
            )
        )

    def decode(self, *rows: tuple[int, int], num_drafts: int = 0):
        """rows: slot and upper bound of its length."""
        n, length = len(rows), 1 + num_drafts
        first = 100 * (1 + len(self.device.steps))
        return self.executor.launch(
            StepPlan(
                step_id=len(self.device.steps),
                is_decode=not num_drafts,
                slots=int32(*(slot for slot, _ in rows)),
                num_new_tokens=int32(*[length] * n),
                prefix_lens=int32(*(bound for _, bound in rows)),
                samples=int32(*[length] * n),
                input_ids=int32(*([LAST_SAMPLED_TOKEN] + [DRAFT_TOKEN] * num_drafts) * n),
                out_cache_loc=int32(*range(first, first + n * length)),
            )
        )

    def end(self, number: int, *token_ids: int, failed_rows: tuple[int, ...] = ()) -> None:
        self.device.steps[number].own = StepResult(int32(*token_ids), failed_rows=failed_rows)

    @property
    def last_plan(self) -> StepPlan:
        return self.device.steps[-1].plan


def test_steps_without_drafts_are_launched_ahead_and_as_they_are_planned():
    rig = Rig()
    rig.prompts(0, 1)
    rig.decode((0, 3), (1, 3))
    assert rig.last_plan.input_ids.tolist() == [LAST_SAMPLED_TOKEN] * 2
    assert rig.last_plan.out_cache_loc.tolist() == [200, 201]
    rig.end(0, 7, 8)
    rig.decode((0, 4), (1, 4))
    # Nothing has been awaited: an unread result raises.
    assert [step.num_awaited for step in rig.device.steps] == [0, 0, 0]


def test_a_step_with_drafts_waits_names_its_tokens_and_counts_the_wait_as_its_own():
    rig = Rig()
    rig.prompts(0, 1)
    rig.end(0, 7, 8)
    step = rig.decode((0, 3), (1, 3), num_drafts=2)
    assert rig.last_plan.input_ids.tolist() == [7, 50, 50, 8, 50, 50]
    # One draft of slot 0 is right and none of slot 1.
    rig.end(1, 50, 60, 61, 70, 71, 72)
    outcome = step.outcome()
    assert (outcome.started_s, outcome.finished_s) == (1.0, 2.0)
    assert outcome.result.token_ids.tolist() == [50, 60, 70]
    assert outcome.result.run_lens.tolist() == [2, 1]
    assert outcome.result.num_drafts.tolist() == [2, 2]
    assert step.outcome() is outcome
    # A plain step behind it goes on from where texts are, at places that the first one took.
    plain = rig.decode((0, 6), (1, 6))
    assert rig.last_plan.prefix_lens.tolist() == [5, 4]
    assert rig.last_plan.input_ids.tolist() == [60, 70]
    assert rig.last_plan.out_cache_loc.tolist() == [202, 204]
    rig.end(2, 9, 9)
    assert plain.outcome().started_s == 2.25
    assert rig.proposer.observed == [([0, 1], [3, 3], [7, 8]), ([0, 1], [5, 4], [60, 70])]


def test_a_run_is_gone_on_from_by_name_behind_a_step_that_is_not_awaited():
    """The device remembers the run's last sample, which need not hold."""
    rig = Rig()
    rig.prompts(0)
    rig.end(0, 7)
    rig.decode((0, 3), num_drafts=2)
    rig.end(1, 60, 61, 62)
    rig.prompts(1)
    rig.decode((0, 6), (1, 3))
    assert rig.last_plan.input_ids.tolist() == [60, LAST_SAMPLED_TOKEN]
    assert rig.last_plan.prefix_lens.tolist() == [4, 3]


def test_what_ends_late_is_not_said_in_the_slots_new_request():
    rig = Rig()
    rig.prompts(0, 1)
    rig.end(0, 7, 8)
    late = rig.decode((0, 3), (1, 3))
    rig.prompts(1)
    rig.end(1, 30, 31)
    rig.end(2, 9)
    late.outcome()
    rig.decode((0, 4), (1, 3), num_drafts=1)
    assert rig.last_plan.input_ids.tolist() == [30, 50, 9, 50]
    assert rig.history.token_ids[1, :5].tolist() == [1, 2, 3, 9, 0]
    assert rig.proposer.observed[1:] == [([0], [4], [30]), ([1], [3], [9])]


def test_a_row_without_memory_or_numbers_ends_its_run():
    rig = Rig()
    rig.prompts(0, 1)
    rig.end(0, 7, 8)
    step = rig.decode((0, 3), (1, 3), num_drafts=2)
    rig.end(1, NAN_TOKEN, 50, NAN_TOKEN, 60, failed_rows=(0,))
    result = step.outcome().result
    assert result.failed_rows == (0,)
    assert result.token_ids.tolist() == [NAN_TOKEN, 50, NAN_TOKEN]
    assert result.run_lens.tolist() == [1, 2]


def test_a_result_of_another_step_is_refused():
    rig = Rig()
    rig.prompts(0)
    rig.end(0, 7)
    step = rig.decode((0, 3), num_drafts=2)
    rig.end(1, 7, 8)
    with pytest.raises(ValueError, match="samples 3 tokens, its result has 2"):
        step.outcome()
