"""How long steps with a head take, as it is told: all that the head reads is in it."""

import time
from typing import Any

import pytest
import torch

from tests.fakes.rank_drafts import ReplayingRank
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import StepRecord
from workers.engine.protocol import GenerateRequest
from workers.runner.cuda_executor import CudaStepExecutor, DeviceClock
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.executor import StepExecutor
from workers.sampling.params import SamplingParams
from workers.speculation.device_pairs import DevicePairs

READ_S = 0.02


class TimedEvent:
    """A torch.cuda.Event of a device that does at once what it is handed."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Long past."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        elapsed_ms: float = (end_event.at_s - self.at_s) * 1e3
        return elapsed_ms


class SlowlyReadingRank(ReplayingRank):
    """Its head takes READ_S to read a step's pairs, in graphs as well."""

    launch = CudaRankDraftsRunner.launch

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._clock = DeviceClock(time.perf_counter)
        drafter = self._device_drafter
        assert isinstance(drafter, DevicePairs)
        head, read = drafter._head, drafter._head.read

        def slowly(*pairs: Any) -> None:
            time.sleep(READ_S)
            read(*pairs)

        head.read = slowly  # type: ignore[method-assign]

    def make_executor(self) -> StepExecutor:
        return CudaStepExecutor(self.launch, self._masks, self.prepare_while_idle, self.close)


def run_without_drafts(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    engine.submit(GenerateRequest("a", list(range(20, 40)), sampling, max_draft_tokens=0))
    while engine.has_work:
        engine.step()


def test_a_plain_step_takes_what_the_head_reads_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    config = EngineConfig(
        device="cpu",
        num_cpu_threads=1,
        max_running_requests=4,
        speculative="eagle3:builtin-head",
        draft_policy="adaptive",
        max_draft_tokens=2,
    )
    records: list[StepRecord] = []
    engine = Engine.of_runner(config, SlowlyReadingRank(config), on_step=records.append)
    try:
        run_without_drafts(engine)
        records.clear()
        # By now there is a graph.
        run_without_drafts(engine)
    finally:
        engine.close()
    plain = [one for one in records if not (one.num_prefill_tokens or one.draft_s)]
    assert len(plain) >= 8
    assert min(one.step_s for one in plain) >= 0.9 * READ_S
