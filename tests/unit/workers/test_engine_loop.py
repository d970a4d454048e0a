"""The engine's thread: every submitted request ends exactly once, whatever happens around it."""

import threading
import time

import pytest

from tests.fakes.engine import FakeEngine
from workers.engine_loop import EngineLoop
from workers.errors import ErrorCode
from workers.protocol import FinishReason, GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams


class Sink:
    """Collects outputs and failures across threads."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.failures: list[BaseException] = []
        self.changed = threading.Condition()

    def on_outputs(self, outputs: list[StepOutput]) -> None:
        with self.changed:
            self.outputs += outputs
            self.changed.notify_all()

    def on_failure(self, failure: BaseException) -> None:
        with self.changed:
            self.failures.append(failure)
            self.changed.notify_all()

    def ends(self) -> dict[str, FinishReason]:
        ended = [o for o in self.outputs if o.finish_reason is not None]
        assert len({o.request_id for o in ended}) == len(ended)
        return {o.request_id: o.finish_reason for o in ended if o.finish_reason is not None}

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=5.0)


def request(name: str, num_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3], SamplingParams(max_tokens=num_tokens))


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def make_loop(sink):
    loops: list[EngineLoop] = []

    def make(**settings) -> EngineLoop:
        loop = EngineLoop(FakeEngine(**settings), sink.on_outputs, sink.on_failure)
        loops.append(loop)
        loop.start()
        return loop

    yield make
    for loop in loops:
        loop.stop()


def test_every_request_ends_once(make_loop, sink) -> None:
    loop = make_loop()
    names = [str(index) for index in range(50)]
    loop.submit([request(name) for name in names])
    sink.wait_for(lambda: len(sink.ends()) == 50)
    assert set(sink.ends().values()) == {FinishReason.LENGTH}


def test_a_refused_request_ends_with_its_code(make_loop, sink) -> None:
    loop = make_loop(max_waiting=1, step_s=0.05)
    loop.submit([request(str(index)) for index in range(3)])
    sink.wait_for(lambda: len(sink.ends()) == 3)
    codes = [output.error.code for output in sink.outputs if output.error is not None]
    assert codes
    assert set(codes) == {ErrorCode.QUEUE_FULL}


def test_an_abort_reaches_a_running_request(make_loop, sink) -> None:
    loop = make_loop(step_s=0.005)
    loop.submit([request("long", 10_000)])
    sink.wait_for(lambda: bool(sink.outputs))
    loop.abort(["long", "unknown"])
    sink.wait_for(lambda: "long" in sink.ends())
    assert sink.ends() == {"long": FinishReason.ABORT}


def test_draining_refuses_new_requests_and_finishes_old_ones(make_loop, sink) -> None:
    loop = make_loop(step_s=0.002)
    loop.submit([request("old", 20)])
    sink.wait_for(lambda: bool(sink.outputs))
    loop.drain()
    loop.submit([request("new")])
    sink.wait_for(lambda: len(sink.ends()) == 2)
    assert sink.ends() == {"old": FinishReason.LENGTH, "new": FinishReason.ERROR}
    deadline_s = time.monotonic() + 5.0
    while not loop.is_drained():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_failing_step_is_reported_once_and_later_submits_are_refused(make_loop, sink) -> None:
    loop = make_loop(fail_after_steps=2)
    loop.submit([request("victim", 100)])
    sink.wait_for(lambda: bool(sink.failures))
    assert len(sink.failures) == 1
    assert not loop.is_alive
    loop.submit([request("late")])
    sink.wait_for(lambda: "late" in sink.ends())
    (late,) = [output for output in sink.outputs if output.request_id == "late"]
    assert late.error is not None
    assert late.error.code is ErrorCode.ENGINE_FAILED


def test_the_heartbeat_beats_while_idle(make_loop) -> None:
    loop = make_loop()
    first = loop.last_beat_s
    time.sleep(1.2)
    assert loop.last_beat_s > first


def test_an_idle_engine_prepares_piece_by_piece_and_not_while_it_works(sink) -> None:
    engine = PreparingEngine(max_preparations=3, step_s=0.03)
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.submit([request("first", 8)])
    loop.start()
    sink.wait_for(lambda: "first" in sink.ends())
    assert engine.num_preparations == 0
    deadline_s = time.monotonic() + 5.0
    while engine.num_preparations < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    loop.submit([request("second")])
    sink.wait_for(lambda: "second" in sink.ends())
    loop.stop()
    assert engine.num_preparations == 3
    assert not engine.prepared_with_work


class PreparingEngine(FakeEngine):
    """Notes whether it was ever told to prepare although it had work."""

    prepared_with_work = False

    def prepare_while_idle(self) -> bool:
        self.prepared_with_work = self.prepared_with_work or self.has_work
        return super().prepare_while_idle()
