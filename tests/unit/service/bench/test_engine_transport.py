"""In process: the same requests through an EngineLoop, with the engine's own token counts."""

import asyncio
import time

import pytest

from service.bench.engine_transport import EngineTransport
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.asyncio


async def started(engine: FakeEngine) -> EngineTransport:
    transport = EngineTransport(lambda: engine, GenerationSettings())
    await transport.connect()
    return transport


async def test_a_request_runs_to_its_length_with_every_token_timed() -> None:
    engine = FakeEngine(step_s=0.005)
    transport = EngineTransport(lambda: engine, GenerationSettings())
    assert await transport.connect() == TargetInfo("fake", 4096, 1 << 16)
    before_s = time.perf_counter()
    traces = [RequestTrace(due_s=before_s) for _ in range(3)]
    await asyncio.gather(
        *(transport.send(BenchRequest(i, [1, 2, 3], 5), t) for i, t in enumerate(traces))
    )
    await transport.aclose()
    for trace in traces:
        assert trace.num_input_tokens == 3
        assert trace.num_output_tokens == 5
        assert list(trace.event_tokens) == [1] * 5
        assert trace.event_times_s[-1] - trace.event_times_s[0] > 0.015
        assert before_s < trace.event_times_s[0] < time.perf_counter()


async def test_what_the_engine_refuses_fails_with_its_code() -> None:
    transport = await started(FakeEngine(max_context_len=4))
    with pytest.raises(RequestFailedError, match="too long") as caught:
        await transport.send(BenchRequest(0, [1] * 9, 5), RequestTrace(due_s=0.0))
    assert caught.value.code == "context_length_exceeded"
    await transport.aclose()


async def test_an_engine_that_fails_ends_every_request() -> None:
    transport = await started(FakeEngine(step_s=0.001, fail_after_steps=3))
    results = await asyncio.gather(
        *(transport.send(BenchRequest(i, [1], 50), RequestTrace(due_s=0.0)) for i in range(4)),
        return_exceptions=True,
    )
    await transport.aclose()
    assert [getattr(result, "code", None) for result in results] == ["engine_failed"] * 4


async def test_a_cancelled_request_is_aborted_in_the_engine() -> None:
    engine = FakeEngine(step_s=0.002)
    transport = await started(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await transport.send(BenchRequest(0, [1], 10_000), RequestTrace(due_s=0.0))
    async with asyncio.timeout(2.0):
        while engine.has_work:
            await asyncio.sleep(0.005)
    await transport.aclose()


async def test_a_model_that_cannot_be_loaded_is_a_target_error() -> None:
    def load() -> FakeEngine:
        raise TargetError("no such model")

    transport = EngineTransport(load, GenerationSettings())
    with pytest.raises(TargetError, match="no such model"):
        await transport.connect()
    await transport.aclose()
