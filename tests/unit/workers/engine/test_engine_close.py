"""An engine can be closed whatever its steps did: nothing of it is left, and nothing is raised."""

import threading
from collections.abc import Callable

import pytest
import torch

from workers import Engine
from workers.config import EngineConfig
from workers.constraints.masks import StepMasks
from workers.engine.protocol import GenerateRequest
from workers.parallel.group import SingleRank
from workers.parallel.rank_group import BroadcastStepExecutor
from workers.runner.executor import PendingStep, StepExecutor, StepOutcome
from workers.runner.factory import make_model_runner
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import StepPlan

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CONFIG = EngineConfig(page_size=16, kv_cache_bytes=8 << 20)


class DeviceError(RuntimeError):
    """What a device says from some step on, to whatever it is asked."""


def failing_from(step_id: int):
    """ModelRunner.run, until the device fails."""
    run = ModelRunner.run

    def fail(self: ModelRunner, plan: StepPlan) -> StepOutcome:
        if plan.step_id >= step_id:
            raise DeviceError(f"step {plan.step_id}")
        return run(self, plan)

    return fail


def step_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tessera-step")}


class Ranks:
    """What BroadcastStepExecutor knows of a RankGroup; sender is itself."""

    def __init__(self) -> None:
        self.sender = self
        self.is_closed = False

    def send(self, plan: StepPlan) -> None:
        """There is no follower."""

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FailingToClose:
    """As an executor of a device that has failed: it lets go of everything, then raises."""

    def __init__(self, inner: StepExecutor) -> None:
        self._inner = inner

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._inner.launch(plan)

    def named(self, plan: StepPlan) -> StepPlan:
        return plan

    def provide(self, masks: StepMasks) -> None:
        self._inner.provide(masks)

    def forget_masks(self) -> None:
        self._inner.forget_masks()

    def prepare_while_idle(self) -> bool:
        return self._inner.prepare_while_idle()

    def close(self) -> None:
        self._inner.close()
        raise DeviceError("synchronize")


def as_it_is(inner: StepExecutor) -> StepExecutor:
    return inner


def make_engine(ranks: Ranks, change: Callable[[StepExecutor], StepExecutor]) -> Engine:
    runner = make_model_runner(CONFIG, SingleRank(), torch.device("cpu"), lambda done, total: None)
    return Engine.of_runner(
        CONFIG, runner, wrap_executor=lambda inner: BroadcastStepExecutor(change(inner), ranks)
    )


@pytest.mark.parametrize("step_id", [0, 1, 3])
@pytest.mark.parametrize("change", [as_it_is, FailingToClose])
def test_after_a_failed_step_close_releases_everything(monkeypatch, step_id, change):
    monkeypatch.setattr(ModelRunner, "run", failing_from(step_id))
    before, ranks = step_threads(), Ranks()
    engine = make_engine(ranks, change)
    with pytest.raises(DeviceError, match=f"step {step_id}"):
        engine.generate([[5, 6, 7]], PARAMS)
    engine.close()
    engine.close()
    assert ranks.is_closed
    assert step_threads() <= before


def test_a_step_that_fails_while_an_engine_is_closed_is_no_ones_error(monkeypatch):
    monkeypatch.setattr(ModelRunner, "run", failing_from(0))
    before = step_threads()
    engine = Engine.from_config(CONFIG)
    engine.submit(GenerateRequest("a", [5, 6, 7], PARAMS))
    engine.step()
    engine.close()
    assert step_threads() <= before


def test_a_sound_engine_says_when_it_cannot_be_closed():
    engine = make_engine(Ranks(), FailingToClose)
    engine.generate([[5, 6, 7]], PARAMS)
    with pytest.raises(DeviceError):
        engine.close()
