"""Captures that fail, on a CPU: the engine goes on serving, with the graphs that it has."""

from types import SimpleNamespace

import pytest
import torch

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.workers.graphs.test_decode_graphs import (
    CPU,
    GREEDY,
    GraphedCpuRunner,
    config_of,
    generate,
    prompts_of,
)
from workers.graphs.capture_attempts import CaptureAttempts
from workers.parallel.group import SingleRank
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams

INJECTED = [torch.OutOfMemoryError("injected"), RuntimeError("operation not permitted: injected")]

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("graphs")))


class RunnerThatCaptures(GraphedCpuRunner):
    """Captures behind steps as the runner on CUDA does."""

    _capture_missing = CudaModelRunner._capture_missing
    _segments = _verify_graphs = None

    def use_graphs(self, sizes, interval_steps=0):
        super().use_graphs(sizes, interval_steps)
        self.num_freed = 0
        self._graphs, self._captures = self.graphs, CaptureAttempts(True, self._free)

    def _free(self):
        self.num_freed += 1

    def capture_after(self, plan):
        CudaModelRunner._capture_after(self, plan)


class FailingCapturer:
    """Before it runs anything, or where the model's layers have run and no token is there yet."""

    def __init__(self, model, error, ran_layers):
        self.model, self.error, self.ran_layers = model, error, ran_layers
        self.num_tried = 0

    def capture(self, run):
        self.num_tried += 1
        if self.ran_layers:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.model, "local_logits", self._fail)
                run()
        self._fail()

    def _fail(self, *args):
        raise self.error


@pytest.mark.parametrize("ran_layers", [False, True])
@pytest.mark.parametrize("error", INJECTED, ids=["memory", "not_permitted"])
def test_an_engine_outlives_a_capture_that_fails(folder, error, ran_layers, caplog) -> None:
    """One size has its graph before, which is replayed still, and from the right staging slots."""
    config, prompts = config_of(folder, max_step_tokens=48), prompts_of(5)
    eager = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, GREEDY)
    runner = RunnerThatCaptures(config, SingleRank(), CPU, print)
    runner.use_graphs([4, 8])
    runner.graphs.capture(4)
    failing = runner.graphs._capturer = FailingCapturer(runner._model, error, ran_layers)
    graphed = generate(config, runner, prompts, [GREEDY] * 4 + [SHORT])
    assert [r.token_ids for r in graphed[:4]] == [r.token_ids for r in eager[:4]]
    assert runner.graphs.captured_sizes == [4]
    assert runner.capturer.num_replays >= 4
    assert (failing.num_tried, runner.num_freed) == (1, 1)
    assert caplog.text.count("no further CUDA graphs are captured") == 1
    assert "injected" in caplog.text


def fails():
    raise torch.OutOfMemoryError("injected")


def test_of_several_ranks_a_capture_that_fails_is_an_error() -> None:
    attempts = CaptureAttempts(is_alone=False, free_memory=lambda: None)
    assert attempts.attempt(lambda: True)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        attempts.attempt(fails)


def test_what_is_no_matter_of_the_device_is_an_error() -> None:
    def wrong():
        raise TypeError("injected")

    with pytest.raises(TypeError, match="injected"):
        CaptureAttempts(is_alone=True, free_memory=lambda: None).attempt(wrong)


@pytest.mark.parametrize("failing", ["_graphs", "_segments"])
def test_an_idle_engine_gives_captures_up_and_prepares_its_model(failing) -> None:
    done: list[str] = []
    runner = CudaModelRunner.__new__(CudaModelRunner)
    runner._graphs = runner._segments = SimpleNamespace(capture_next=lambda: False)
    setattr(runner, failing, SimpleNamespace(capture_next=fails))
    runner._captures = CaptureAttempts(is_alone=True, free_memory=lambda: done.append("freed"))
    runner._model = SimpleNamespace(prepare_while_idle=lambda: done.append("model"))
    for _ in range(2):
        assert not runner.prepare_while_idle()
    assert done == ["freed", "model", "model"]
