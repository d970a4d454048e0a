"""The engine's thread: every submitted request ends exactly once, whatever happens around it."""

import threading
import time

import pytest

from tests.fakes.engine import FakeEngine
from workers.engine.loop import EngineLoop
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import EngineFailedError, ErrorCode
from workers.sampling.params import SamplingParams

# For what certainly comes, on a machine that is busy with others.
WAIT_S = 60.0


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
            assert self.changed.wait_for(condition, timeout=WAIT_S)


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
    deadline_s = time.monotonic() + WAIT_S
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


def test_what_is_submitted_after_a_stop_is_refused(make_loop, sink) -> None:
    loop = make_loop()
    loop.stop()
    loop.submit([request("late")])
    loop.abort(["late"])
    (late,) = sink.outputs
    assert (late.request_id, late.finish_reason) == ("late", FinishReason.ERROR)
    assert late.error is not None
    assert late.error.code is ErrorCode.ENGINE_DRAINING


def test_what_no_step_has_taken_in_when_a_loop_stops_is_refused(sink) -> None:
    engine = StuckEngine()
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.submit([request("running")])
    loop.start()
    assert engine.is_stepping.wait(WAIT_S)
    loop.submit([request("queued")])
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    engine.may_go_on.set()
    stopping.join(WAIT_S)
    assert sink.ends()["queued"] is FinishReason.ERROR


def test_what_came_with_a_failing_step_is_refused(sink) -> None:
    engine = StuckEngine(fail_after_steps=0)
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.submit([request("running")])
    loop.start()
    assert engine.is_stepping.wait(WAIT_S)
    loop.submit([request("queued")])
    engine.may_go_on.set()
    sink.wait_for(lambda: "queued" in sink.ends())
    (queued,) = [output for output in sink.outputs if output.request_id == "queued"]
    assert queued.error is not None
    assert queued.error.code is ErrorCode.ENGINE_FAILED
    loop.stop()


def test_an_engine_whose_step_does_not_end_is_not_closed_under_it(sink) -> None:
    engine = StuckEngine()
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.submit([request("running")])
    loop.start()
    assert engine.is_stepping.wait(WAIT_S)
    with pytest.raises(EngineFailedError, match="did not end"):
        loop.stop(timeout_s=0.05)
    assert not engine.is_closed
    engine.may_go_on.set()
    loop.stop()
    assert engine.is_closed


def test_the_heartbeat_beats_while_idle(make_loop) -> None:
    loop = make_loop()
    first = loop.last_beat_s
    wait_until(lambda: loop.last_beat_s > first)


def test_an_idle_engine_prepares_piece_by_piece_and_not_while_it_works(sink) -> None:
    engine = PreparingEngine(max_preparations=3, step_s=0.03)
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.submit([request("first", 8)])
    loop.start()
    sink.wait_for(lambda: "first" in sink.ends())
    deadline_s = time.monotonic() + WAIT_S
    while engine.num_preparations < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    loop.submit([request("second")])
    sink.wait_for(lambda: "second" in sink.ends())
    loop.stop()
    assert engine.num_preparations == 3
    assert not engine.prepared_with_work


class StuckEngine(FakeEngine):
    """Its first step waits until it may go on."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.is_stepping = threading.Event()
        self.may_go_on = threading.Event()
        self.is_closed = False

    def step(self) -> list[StepOutput]:
        self.is_stepping.set()
        assert self.may_go_on.wait(WAIT_S)
        return super().step()

    def close(self) -> None:
        self.is_closed = True
        super().close()


class PreparingEngine(FakeEngine):
    """Notes whether it was ever told to prepare although it had work."""

    prepared_with_work = False

    def prepare_while_idle(self) -> bool:
        self.prepared_with_work = self.prepared_with_work or self.has_work
        return super().prepare_while_idle()


class HeldEngine(FakeEngine):
    """It takes as many steps as the test lets it take."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.steps = threading.Semaphore(0)

    def step(self):
        assert self.steps.acquire(timeout=WAIT_S)
        return super().step()


def test_a_request_counts_as_waiting_from_its_submission_on(sink) -> None:
    engine = HeldEngine(default_max_tokens=10_000)
    loop = EngineLoop(engine, sink.on_outputs, sink.on_failure)
    loop.start()
    try:
        loop.submit([request("in the step", 10_000)])
        wait_until(lambda: engine.waiting)
        loop.submit([request("b", 10_000), request("c", 10_000)])
        loop.abort(["nobody"])
        assert (loop.stats().num_running, loop.stats().num_waiting) == (0, 3)
        assert loop.stats().queued_tokens == 9
        engine.steps.release(2)
        wait_until(lambda: loop.stats().num_running == 3)
        assert (loop.stats().num_waiting, loop.stats().queued_tokens) == (0, 0)
    finally:
        engine.steps.release(2)
        loop.stop()


def wait_until(condition) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)
