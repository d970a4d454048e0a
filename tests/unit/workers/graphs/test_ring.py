"""The ring that decode graphs take their rows from: whose tokens a slot holds, and for how long."""

import pytest
import torch
from torch.nn import functional

from workers.graphs.decode_graphs import GraphedStep
from workers.graphs.decode_step import StepRows, TorchStepKernels
from workers.graphs.ring import NUM_STAGING_SLOTS, StagingRing, UploadRing
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS

CPU = torch.device("cpu")


class RingOfOneRow:
    """A ring whose steps sample the tokens that they are told to."""

    def __init__(self, max_plans):
        self._kernels = TorchStepKernels(
            (torch.zeros((4, 6), dtype=torch.int32),), torch.zeros(4).long()
        )
        self._rows, self.staging = (
            StepRows.allocate(1, CPU, 1),
            StagingRing.on_host(1, max_plans, 1),
        )

    def launch(self, token_id):
        slot = self.staging.take()
        self._kernels.begin(self.staging.ring, self._rows)
        logits = functional.one_hot(torch.tensor([token_id]), 8).float()
        self._kernels.end(logits, self._rows.slots, self.staging.ring)
        return GraphedStep(slot, slot.step, 1)


@pytest.mark.parametrize("max_plans", [MAX_UNCOMMITTED_PLANS, NUM_STAGING_SLOTS])
def test_a_step_s_tokens_outlive_the_plans_that_may_come_before_its_commit(max_plans) -> None:
    ring = RingOfOneRow(max_plans)
    for _ in range(3):
        first = ring.launch(5)
        for _ in range(max_plans - 1):
            ring.launch(6)
        assert first.read().token_ids.tolist() == [5]


def test_tokens_of_a_slot_that_is_another_step_s_by_now_are_refused() -> None:
    ring = RingOfOneRow(NUM_STAGING_SLOTS)
    first = ring.launch(5)
    for _ in range(NUM_STAGING_SLOTS):
        last = ring.launch(6)
    assert last.slot is first.slot
    assert last.read().token_ids.tolist() == [6]
    with pytest.raises(RuntimeError, match="read for step 1 and filled for step 5"):
        first.read()


def test_a_ring_of_fewer_slots_than_plans_under_way_is_refused() -> None:
    with pytest.raises(ValueError, match="need as many slots, got 4"):
        StagingRing.on_host(1, NUM_STAGING_SLOTS + 1, 1)


def test_tokens_that_the_device_has_not_given_yet_are_refused() -> None:
    staging = StagingRing.on_host(1, 1, 1)
    slot = staging.take()
    with pytest.raises(RuntimeError, match="answered"):
        GraphedStep(slot, slot.step, 1).read()


class Mark:
    """Passed where somebody waits for it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.has_passed = False

    def record(self) -> None:
        self._log.append("recorded")
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self._log.append("awaited")
        self.has_passed = True


def test_what_is_taken_is_zeros_and_what_is_sent_stands_at_the_tensors_beginning() -> None:
    on_device = torch.full((8,), 9)
    ring = UploadRing.onto(on_device)
    for turn in range(2 * NUM_STAGING_SLOTS):
        taken = ring.take(2, 3)
        assert not taken.any()
        taken[1] = 10 + turn
        sent = ring.send()
        assert sent.tolist() == [[0] * 3, [10 + turn] * 3]
        assert on_device.tolist() == [0, 0, 0, *[10 + turn] * 3, 9, 9]
    assert ring.take(2, 2).shape == (2, 2)
    assert ring.send().data_ptr() == on_device.data_ptr()


def test_memory_is_filled_anew_once_the_device_has_copied_it() -> None:
    log: list[str] = []
    marks = [Mark(log), Mark(log)]
    ring = UploadRing(torch.zeros(4).long(), marks)
    for _ in range(2):
        ring.take(1, 4)
        ring.send()
    marks[0].has_passed = True
    ring.take(1, 4)
    assert log == ["recorded", "recorded"]
    ring.send()
    ring.take(1, 4)
    assert log == ["recorded", "recorded", "recorded", "awaited"]


def test_nothing_is_sent_that_was_not_taken() -> None:
    ring = UploadRing.onto(torch.zeros(4).long())
    ring.take(1, 4)
    ring.send()
    with pytest.raises(RuntimeError, match="nothing was taken"):
        ring.send()
