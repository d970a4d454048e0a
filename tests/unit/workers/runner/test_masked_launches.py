"""Steps that wait for masks as a CUDA runner launches them, on a CPU: the forward pass at once, the
samples with the masks."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.unit.workers.engine.test_grammars import MIXED, check, request_of, run, run_together
from tests.unit.workers.graphs.test_decode_graphs import (
    MAX_ROWS,
    SIZES,
    GraphedCpuRunner,
    TwoSecondEvent,
)
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.capture_attempts import CaptureAttempts
from workers.parallel.group import SingleRank
from workers.runner import cuda_model_runner
from workers.runner.cuda_executor import DeviceClock, HalfLaunchedStep
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.model_runner import ModelRunner

TOKENIZER = AutoTokenizer.from_pretrained(builtin_model_path())


class DeviceEvent(TwoSecondEvent):
    def __init__(self, enable_timing: bool = False) -> None:
        """No device keeps its time."""

    def synchronize(self) -> None:
        """Nothing is launched behind the host's back."""


class StandIn(GraphedCpuRunner, CudaModelRunner):
    """Launches as CudaModelRunner does, with a closure's graphs and masks in plain torch.

    failing_half: of a launch, which now and then lacks memory for several rows. How many launches
    there are depends on when masks come, and one row has no smaller pieces.
    """

    _launch = ModelRunner._launch
    launch = CudaModelRunner.launch

    def __init__(self, config: EngineConfig, sizes: list[int]) -> None:
        device = torch.device("cpu")
        ModelRunner.__init__(self, config, SingleRank(), device, lambda done, total: None)
        self.use_graphs(sizes)
        self._graphs = self.graphs
        self._segments = self._verify_graphs = self._speculation = None
        self._clock = DeviceClock(lambda: 0.0)
        self._captures = CaptureAttempts(is_alone=True, free_memory=lambda: None)
        self.failing_half = ""
        self.num_calls = self.num_failures = 0

    def _fail(self, half: str, num_rows: int) -> None:
        if half != self.failing_half or num_rows == 1:
            return
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"injected: {half}")

    def _begin_any(self, plan: Any) -> Any:
        self._fail("begin", plan.batch_size)
        return super()._begin_any(plan)

    def _sample_masked(self, *args: Any) -> Any:
        *_, slots, _ = args
        self._fail("finish", len(slots))
        return ModelRunner._sample_masked(self, *args)

    def close(self) -> None:
        """No device."""

    def _free_memory(self) -> None:
        """No device."""


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_model_runner.torch.cuda, "Event", DeviceEvent)


def start(sizes: list[int] = SIZES, **settings: Any) -> tuple[Engine, StandIn]:
    config = EngineConfig(
        num_cpu_threads=1,
        max_running_requests=MAX_ROWS,
        check_integrity_when_idle=True,
        **settings,
    )
    runner = StandIn(config, sizes)
    return Engine.of_runner(config, runner), runner


def texts(results: list[Any]) -> list[list[int]]:
    return [one.token_ids for one in results]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    engine = Engine.from_config(EngineConfig(num_cpu_threads=1))
    try:
        return texts(run(engine, *MIXED))
    finally:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4, "num_pages": 14, "max_step_tokens": 24},
        {"enable_overlap": False, "enable_mixed_batches": False},
    ],
    ids=["together", "few_pages_and_chunks", "step_by_step"],
)
def test_outputs_are_those_of_steps_in_one_piece(
    expected: list[list[int]], settings: dict[str, Any]
) -> None:
    engine, runner = start(**settings)
    try:
        # The second time, sizes that the first one wanted have been captured.
        for _ in range(2):
            results = run(engine, *MIXED)
            assert texts(results) == expected
            check(results)
        assert runner.capturer.num_replays > 10
    finally:
        engine.close()


@pytest.mark.parametrize("half", ["begin", "finish"])
def test_a_half_that_lacks_memory_is_launched_again_in_pieces(
    expected: list[list[int]], half: str
) -> None:
    engine, runner = start()
    try:
        run_together(engine, *MIXED)
        runner.failing_half = half
        assert texts(run_together(engine, *MIXED)) == expected
        assert runner.num_failures > 3
    finally:
        engine.close()


def test_nothing_is_launched_and_nothing_awaited_before_the_masks_are_there() -> None:
    engine, _ = start()
    engine.submit(request_of(0, MIXED[0].grammar))
    launched: list[Any] = []
    executor = engine._executor
    launch, executor.provide = executor.launch, lambda masks: None  # type: ignore[method-assign]
    executor.launch = lambda plan: launched.append((plan, launch(plan))) or launched[-1][1]
    while not launched:
        engine.step()
    plan, step = launched[0]
    assert isinstance(step, HalfLaunchedStep)
    with pytest.raises(RuntimeError, match="before its masks"):
        step.outcome()
    with pytest.raises(RuntimeError, match="before the masks of the last"):
        launch(plan)
    # What waits for masks ends with the engine.
    engine.close()
    assert len(step.outcome().result.token_ids) == 1
