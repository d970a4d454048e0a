"""A whole run: the target is reached, the workload fits it, warm-up does not count."""

import pytest

from service.bench.engine_transport import EngineTransport
from service.bench.lengths import FixedLength, UniformLength
from service.bench.load import Extent, MonotonicClock
from service.bench.runner import BenchPlan, ClosedLoop, LoadPattern, OpenLoop, run_bench
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.asyncio


class RecordingTransport:
    """Ends every request at once with the tokens it asked for."""

    def __init__(self, info: TargetInfo) -> None:
        self.info = info
        self.requests: list[BenchRequest] = []
        self.failure: RequestFailedError | None = None
        self.is_closed = False

    async def connect(self) -> TargetInfo:
        return self.info

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        trace.num_input_tokens = len(request.prompt_token_ids)
        trace.num_output_tokens = request.max_tokens
        trace.add_event(MonotonicClock().now(), request.max_tokens)

    async def aclose(self) -> None:
        self.is_closed = True


def plan(pattern: LoadPattern, **changes) -> BenchPlan:
    values = {
        "pattern": pattern,
        "extent": Extent(12),
        "num_warmup_requests": 3,
        "input_len": UniformLength(4, 9),
        "output_len": FixedLength(5),
        **changes,
    }
    return BenchPlan(**values)


async def run(transport, a_plan: BenchPlan, phases: list[str] | None = None):
    on_phase = [].append if phases is None else phases.append
    return await run_bench(a_plan, transport, MonotonicClock(), on_phase)


@pytest.mark.parametrize(
    "pattern", [ClosedLoop(4), OpenLoop(2000.0, is_poisson=True), OpenLoop(float("inf"), False)]
)
async def test_warm_up_is_sent_and_not_counted(pattern: LoadPattern) -> None:
    transport = RecordingTransport(TargetInfo("m", 100, 50))
    phases: list[str] = []
    target, result = await run(transport, plan(pattern), phases)
    assert target.model == "m"
    assert len(transport.requests) == 15
    assert (result.num_requests, result.num_ok) == (12, 12)
    assert result.num_output_tokens == 60
    assert result.num_input_tokens == sum(len(r.prompt_token_ids) for r in transport.requests[3:])
    assert phases == ["connecting", "warming up", "running"]
    assert transport.is_closed


async def test_both_patterns_send_the_same_requests() -> None:
    sent = []
    for pattern in (ClosedLoop(2), OpenLoop(5000.0, is_poisson=False)):
        transport = RecordingTransport(TargetInfo("m", 100, 50))
        await run(transport, plan(pattern))
        sent.append(transport.requests)
    assert sent[0] == sent[1]


async def test_a_workload_that_cannot_fit_is_refused_before_anything_is_sent() -> None:
    transport = RecordingTransport(TargetInfo("m", 100, max_context_len=13))
    with pytest.raises(TargetError, match="14 tokens.* takes 13"):
        await run(transport, plan(ClosedLoop(1)))
    assert transport.requests == []
    assert transport.is_closed


async def test_an_unknown_vocabulary_must_be_given() -> None:
    transport = RecordingTransport(TargetInfo("m"))
    with pytest.raises(TargetError, match="--vocab-size"):
        await run(transport, plan(ClosedLoop(1)))
    _, result = await run(transport, plan(ClosedLoop(1), vocab_size=7))
    assert result.num_ok == 12
    assert max(max(r.prompt_token_ids) for r in transport.requests) == 6


async def test_a_warm_up_that_fails_altogether_ends_the_run_with_its_reason() -> None:
    transport = RecordingTransport(TargetInfo("m", 100, 50))
    transport.failure = RequestFailedError("unauthorized", "no key")
    with pytest.raises(TargetError, match="unauthorized: no key"):
        await run(transport, plan(ClosedLoop(1)))
    assert len(transport.requests) == 3


async def test_the_in_process_engine_runs_a_workload_end_to_end() -> None:
    engine = FakeEngine(step_s=0.02)
    transport = EngineTransport(lambda: engine, GenerationSettings())
    target, result = await run(transport, plan(ClosedLoop(4)))
    assert target.model == "fake"
    assert result.num_output_tokens == 60
    assert result.inter_token_s is not None
    assert result.inter_token_s.num_samples == 12 * 4
    # Tokens of a third of the requests may come at once, behind a machine that stood still.
    assert 0.01 < result.inter_token_s.p50 < 2.0
    assert not engine.has_work
