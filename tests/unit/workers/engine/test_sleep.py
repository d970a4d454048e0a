"""Sleep gives memory back and changes no text; what runs or comes meanwhile is told so."""

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine import FakeEngine
from tests.fakes.tiny_models import MIXTURES, THROUGH_TRANSFORMERS, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.loop import EngineLoop
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.engine.rest import SleepOrder
from workers.errors import ErrorCode
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.model_runner import ModelRunner
from workers.runner.rest import rest_obstacle
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams

PROMPTS = [[5, 6, 7, 8] * 20, [9, 10, 11]]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MODELS = {"gpt_oss": MIXTURES["gpt_oss"], "phi3": THROUGH_TRANSFORMERS["phi3"]}


def runner_of(model: str, **changes: Any) -> tuple[EngineConfig, ModelRunner]:
    config = EngineConfig(
        model=model,
        device="cpu",
        num_cpu_threads=1,
        num_pages=256,
        max_context_len=256,
        check_integrity_when_idle=True,
        **changes,
    )
    device = resolve_device(config)
    return config, make_model_runner(config, SingleRank(), device, lambda done, total: None)


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of whole pages behind them."""
    found = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        num_pages = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE
        if num_pages > 0:
            flags = (ctypes.c_ubyte * num_pages)()
            length = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), length, flags) == 0
            found += sum(flag & 1 for flag in flags) * mmap.PAGESIZE
    return found


@pytest.mark.parametrize("name", ["builtin", *MODELS])
def test_texts_are_those_of_before_and_memory_is_given_back(name: str, tmp_path: Path) -> None:
    model = name if name == "builtin" else str(save_tiny_model(MODELS[name], tmp_path))
    config, runner = runner_of(model)
    engine = Engine.of_runner(config, runner)
    pools = runner._token_to_kv_pool.tensors()
    weights = [t for t in runner._weights.values() if t.untyped_storage().resizable()]
    try:
        assert engine.info.sleep_obstacle == ""
        before = [one.token_ids for one in engine.generate(PROMPTS, SAMPLING)]
        whole_kv, whole_weights = resident_bytes(pools), resident_bytes(weights)
        assert whole_kv
        assert whole_weights or name != "builtin"
        for level in (1, 2):
            engine.sleep(level)
            assert engine.stats().sleep_level == level
            assert engine.stats().num_evictable_pages == 0
            assert resident_bytes(pools) == 0
            assert resident_bytes(weights) == (whole_weights if level == 1 else 0)
            engine.check_integrity()
            engine.wake_up(lambda done, total: None)
            results = engine.generate(PROMPTS, SAMPLING)
            assert [one.token_ids for one in results] == before
            assert [one.num_cached_tokens for one in results] == [0, 0]
            assert resident_bytes(weights) == whole_weights
    finally:
        engine.close()


def test_an_engine_with_work_does_not_sleep_and_who_cannot_says_why() -> None:
    config, runner = runner_of("builtin", speculative="draft:builtin-draft")
    engine = Engine.of_runner(config, runner)
    try:
        assert "has a model of its own" in engine.info.sleep_obstacle
        with pytest.raises(RuntimeError, match="cannot sleep"):
            engine.sleep(1)
        engine.submit(GenerateRequest("a", [5], SAMPLING))
        with pytest.raises(RuntimeError, match="with work"):
            engine.sleep(1)
        assert engine.live_request_ids() == ["a"]
    finally:
        engine.close()
    alone = EngineConfig(model="builtin")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert rest_obstacle(alone, cpu, has_encoder=False) == ""
    assert "on GPUs" in rest_obstacle(alone, cuda, has_encoder=False)
    assert "an encoder" in rest_obstacle(alone, cpu, has_encoder=True)
    assert "of its own" in rest_obstacle(EngineConfig(speculative="mtp"), cpu, has_encoder=False)
    assert "ranks" in rest_obstacle(EngineConfig(model="m", tp_size=2), cpu, has_encoder=False)


class Turned:
    """A loop over a fake engine, turned by hand."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.outputs: list[StepOutput] = []
        self.loop = EngineLoop(self.engine, self.outputs.extend, lambda failure: None)

    def submit(self, request_id: str, max_tokens: int = 3) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.loop.submit([GenerateRequest(request_id, [1, 2], sampling)])

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop._rest_s = 0.0
            self.loop._turn()

    def ends(self) -> dict[str, object]:
        ended = [one for one in self.outputs if one.finish_reason is not None]
        return {one.request_id: one.error.code if one.error else one.finish_reason for one in ended}


def test_requests_are_ended_refused_and_taken_again() -> None:
    turned = Turned()
    turned.submit("running", 50)
    turned.turn(2)
    turned.loop.set_sleep(SleepOrder(1, aborts=True))
    turned.submit("late")
    turned.turn(2)
    assert turned.loop.stats().sleep_level == 1
    sleeping = ErrorCode.ENGINE_SLEEPING
    assert turned.ends() == {"running": sleeping, "late": sleeping}
    turned.engine.max_preparations = 1
    turned.turn(2)
    assert turned.engine.num_preparations == 0
    turned.loop.set_sleep(SleepOrder(2, aborts=True))
    turned.turn()
    turned.loop.set_sleep(SleepOrder(1, aborts=True))
    turned.turn()
    assert turned.loop.stats().sleep_level == 2
    turned.loop.set_sleep(SleepOrder(0, aborts=False))
    turned.submit("after")
    turned.turn(1)
    assert turned.loop.stats().sleep_level == 0
    turned.turn(5)
    assert turned.ends()["after"] is FinishReason.LENGTH


def test_requests_that_run_may_end_first_and_an_order_may_be_taken_back() -> None:
    turned = Turned()
    turned.submit("running", 4)
    turned.turn()
    turned.loop.set_sleep(SleepOrder(1, aborts=False))
    turned.submit("late")
    turned.turn()
    assert turned.loop.stats().sleep_level == 0
    turned.turn(5)
    assert turned.loop.stats().sleep_level == 1
    assert turned.ends() == {"late": ErrorCode.ENGINE_SLEEPING, "running": FinishReason.LENGTH}
    turned.loop.set_sleep(SleepOrder(0, aborts=False))
    turned.submit("again", 4)
    turned.turn(2)
    turned.loop.set_sleep(SleepOrder(1, aborts=False))
    turned.turn()
    turned.loop.set_sleep(SleepOrder(0, aborts=False))
    turned.turn(5)
    assert turned.loop.stats().sleep_level == 0
    assert turned.ends()["again"] is FinishReason.LENGTH
