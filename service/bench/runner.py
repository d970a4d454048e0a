"""One benchmark from start to end: reach the target, check that the workload fits it, warm up, run.

Knows load patterns and transports by their interfaces only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from service.bench.arrivals import fixed_arrivals, poisson_arrivals
from service.bench.lengths import LengthDistribution
from service.bench.load import Clock, Extent, LoadGenerator, LoadOutcome
from service.bench.statistics import BenchResult, summarize
from service.bench.transport import TargetError, TargetInfo, Transport
from service.bench.workload import RequestStream, WorkloadShape, generate_requests

MAX_WARMUP_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """concurrency requests are under way at any time."""

    concurrency: int

    def describe(self) -> str:
        return f"closed loop, {self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are due at rate_per_s; at even spacing, or as a Poisson process."""

    rate_per_s: float
    is_poisson: bool

    def describe(self) -> str:
        spacing = "Poisson" if self.is_poisson else "fixed"
        return f"open loop, {spacing} at {self.rate_per_s:g} requests/s"


LoadPattern = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to run. vocab_size: None takes what the target says; see WorkloadShape for the rest."""

    pattern: LoadPattern
    extent: Extent
    num_warmup_requests: int
    input_len: LengthDistribution
    output_len: LengthDistribution
    prefix_share: float = 0.0
    num_prefix_groups: int = 1
    seed: int = 0
    vocab_size: int | None = None


async def run_bench(
    plan: BenchPlan,
    transport: Transport,
    clock: Clock,
    on_phase: Callable[[str], None],
) -> tuple[TargetInfo, BenchResult]:
    """Run a plan against a target. on_phase hears what begins. Raises TargetError."""
    try:
        on_phase("connecting")
        target = await transport.connect()
        shape = _shape_for(plan, target)
        if plan.num_warmup_requests:
            on_phase("warming up")
            await _warm_up(plan, shape, transport, clock)
        on_phase("running")
        outcome = await _run(plan, shape, LoadGenerator(transport.send, clock, plan.extent))
    finally:
        await transport.aclose()
    return target, summarize(outcome, is_open_loop=isinstance(plan.pattern, OpenLoop))


def _shape_for(plan: BenchPlan, target: TargetInfo) -> WorkloadShape:
    vocab_size = plan.vocab_size or target.vocab_size
    if vocab_size is None:
        raise TargetError("the target does not say how large its vocabulary is; use --vocab-size")
    shape = WorkloadShape(
        plan.input_len,
        plan.output_len,
        vocab_size,
        plan.prefix_share,
        plan.num_prefix_groups,
        plan.seed,
    )
    limit = target.max_context_len
    if limit is not None and shape.max_total_tokens > limit:
        raise TargetError(
            f"requests may have {shape.max_total_tokens} tokens, prompt and output together, and "
            f"{target.model} takes {limit}; shorten --input-len or --output-len"
        )
    return shape


async def _warm_up(
    plan: BenchPlan, shape: WorkloadShape, transport: Transport, clock: Clock
) -> None:
    extent = Extent(plan.num_warmup_requests, timeout_s=plan.extent.timeout_s)
    concurrency = min(plan.num_warmup_requests, MAX_WARMUP_CONCURRENCY)
    outcome = await LoadGenerator(transport.send, clock, extent).closed_loop(
        generate_requests(shape, RequestStream.WARMUP), concurrency
    )
    if not any(trace.is_ok for trace in outcome.traces):
        failed = outcome.traces[0]
        raise TargetError(f"warm-up requests fail: {failed.error_code}: {failed.error_message}")


async def _run(plan: BenchPlan, shape: WorkloadShape, generator: LoadGenerator) -> LoadOutcome:
    requests = generate_requests(shape)
    match plan.pattern:
        case ClosedLoop(concurrency):
            return await generator.closed_loop(requests, concurrency)
        case OpenLoop(rate_per_s, is_poisson):
            arrivals = (
                poisson_arrivals(rate_per_s, plan.seed)
                if is_poisson
                else fixed_arrivals(rate_per_s)
            )
            return await generator.open_loop(requests, arrivals)
