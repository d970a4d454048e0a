"""What a rank's slots have and who wears it, where a step found no memory in the midst of it."""

import numpy as np
import pytest
import torch

from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.adapters.stage import AdapterStage
from workers.adapters.worn import WornAdapters
from workers.scheduler.adapter_plan import NO_ADAPTERS, AdapterLoad, AdapterPlan, WornAdapter

OLD, NEW = (AdapterRef(name, f"/{name}", name * 8) for name in ("old", "new"))


class Bank:
    """Holds the name of what fills it; at num_left 0 there is no memory, once."""

    def __init__(self) -> None:
        self.held = ["", "", ""]
        self.num_left = 100

    def fill(self, slot, adapter):
        self.held[slot] = "cleared"
        self.num_left -= 1
        if self.num_left < 0:
            self.num_left = 100
            raise torch.OutOfMemoryError
        self.held[slot] = adapter


class Store:
    def get(self, ref):
        return ref.name


def plan(adapter, *worn, bare=()):
    worn = tuple(WornAdapter(request_slot, 1) for request_slot in worn)
    return AdapterPlan(bare, (AdapterLoad(1, adapter),), worn)


@pytest.fixture
def banks():
    return [Bank(), Bank()]


@pytest.fixture
def stage(banks):
    stage = AdapterStage(AdapterInfo(2, 8, {}), Store(), banks, WornAdapters(), 4)
    stage.apply(plan(OLD, 0))
    assert [bank.held[1] for bank in banks] == ["old", "old"]
    return stage


@pytest.mark.parametrize("num_filled", [0, 1])
def test_what_found_no_memory_is_done_before_the_next_step(stage, banks, num_filled):
    banks[num_filled].num_left = 0
    with pytest.raises(torch.OutOfMemoryError):
        stage.apply(plan(NEW, 3, bare=(0,)))
    stage.apply(NO_ADAPTERS)
    assert [bank.held[1] for bank in banks] == ["new", "new"]
    assert np.array_equal(stage._slots, [0, 0, 0, 1])


def test_a_slot_that_was_half_filled_is_nobodys(stage, banks):
    banks[1].num_left = 0
    with pytest.raises(torch.OutOfMemoryError):
        stage.apply(plan(NEW, 3, bare=(0,)))
    stage.apply(plan(OLD, 2, bare=(3,)))
    assert [bank.held[1] for bank in banks] == ["old", "old"]
    assert np.array_equal(stage._slots, [0, 0, 1, 0])
