"""A step whose drafts find no memory, wherever: who waits for them goes on; of any other failure
they are told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.launching_rank import LaunchingRank
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason
from workers.errors import EngineFailedError
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import DRAFT_TOKEN
from workers.speculation.device_step import DeviceDrafts, RunRows
from workers.speculation.draft_mailbox import DraftMailbox, PassedAtOnce


class Plan(msgspec.Struct):
    """What drafts need of a StepPlan: one row with two drafts."""

    step_id: int
    input_ids: Any
    num_new_tokens: Any
    slots: Any
    prefix_lens: Any
    parents: Any
    has_trees: bool = False
    is_decode: bool = False


def exhausted(*arguments: object) -> None:
    raise torch.OutOfMemoryError("of this test")


def runner_of(place: str, has_graphs: bool) -> tuple[Any, Plan]:
    """A runner whose launch makes drafts only, and has no memory left at one place."""
    row = ([5, DRAFT_TOKEN, DRAFT_TOKEN], [3], [0], [4], [])
    plan = Plan(1, *(np.array(one, np.int32) for one in row))
    runner: Any = object.__new__(CudaRankDraftsRunner)
    runner._mailbox, runner._is_alone = DraftMailbox(PassedAtOnce), True
    runner._device, runner._draft_graphs = torch.device("cpu"), None
    drafts = DeviceDrafts(torch.tensor([[7, 8]]))
    ways = {
        "propose": lambda step: drafts,
        "name": lambda made: None,
        "before": lambda step: None,
        place: exhausted,
    }
    runner._device_drafter = SimpleNamespace(propose=ways["propose"], before=ways["before"])
    if has_graphs:
        runner._draft_graphs = SimpleNamespace(covers=lambda plan: True, run=ways["propose"])
    step = SimpleNamespace(plan=plan, runs=RunRows.of(plan), name=ways["name"])  # type: ignore[arg-type]
    runner._begin_any = lambda plan: runner._make_drafts(step)
    return runner, plan


@pytest.mark.parametrize(
    ("place", "has_graphs"),
    [("propose", False), ("name", False), ("before", False), ("propose", True), ("name", True)],
)
def test_whoever_waits_for_drafts_goes_on(place: str, has_graphs: bool) -> None:
    runner, plan = runner_of(place, has_graphs)
    with runner._mailbox.launching(plan.step_id):
        runner._begin_within_memory(plan)
    waiting = threading.Thread(target=runner._mailbox.named, args=(plan,), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


class BrokenError(Exception):
    """What a launch raises that no memory is to blame for."""


def launch_that_breaks(runner: Any, plan: Plan, is_whole: bool) -> None:
    def launch() -> None:
        with runner._mailbox.launching(plan.step_id):
            if is_whole:
                runner._begin_within_memory(plan)
            raise BrokenError

    with pytest.raises(BrokenError):
        launch()


@pytest.mark.parametrize("waits_before", [True, False])
def test_whoever_waits_for_drafts_is_told_of_any_failure(waits_before: bool) -> None:
    runner, plan = runner_of("nowhere", has_graphs=False)
    pool = ThreadPoolExecutor(1)
    try:
        if waits_before:
            waiting = pool.submit(runner._mailbox.named, plan)
            launch_that_breaks(runner, plan, is_whole=False)
        else:
            launch_that_breaks(runner, plan, is_whole=False)
            waiting = pool.submit(runner._mailbox.named, plan)
        failure = waiting.exception(timeout=60)
        assert isinstance(failure, EngineFailedError)
        assert isinstance(failure.__cause__, BrokenError)
        assert "step 1 has failed" in str(failure)
    finally:
        pool.shutdown(wait=False)


def test_drafts_that_are_there_are_told_though_their_step_fails() -> None:
    runner, plan = runner_of("nowhere", has_graphs=False)
    launch_that_breaks(runner, plan, is_whole=True)
    assert runner._mailbox.named(plan).input_ids.tolist() == [5, 7, 8]


def test_a_row_alone_without_memory_for_its_drafts_fails_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No piece of its step gets as far as its drafts."""
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        speculative="eagle3:builtin-head",
        draft_policy="fixed",
    )
    rank = LaunchingRank(config, monkeypatch)
    monkeypatch.setattr(rank._device_drafter, "propose", exhausted)
    assert rank._draft_graphs is not None
    monkeypatch.setattr(rank._draft_graphs, "covers", lambda plan: False)
    engine, pool = rank.engine(), ThreadPoolExecutor(1)
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    try:
        running = pool.submit(engine.generate, [[*range(20, 40)]], asked)
        (result,) = running.result(timeout=60)
    finally:
        pool.shutdown(wait=False)
    engine.close()
    assert result.finish_reason is FinishReason.ERROR
