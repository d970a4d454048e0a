"""What benchmarks/serve_overhead.py sends, and one run of it: the same requests for every way.

A level is a closed loop of so many streams. Its requests are dealt to client processes in turn, so
their union does not depend on how many there are. Knows no server and no engine.
"""

import itertools
import resource
import secrets
from array import array
from collections.abc import Iterator

import msgspec

from service.bench.lengths import parse_length
from service.bench.load import Extent, LoadGenerator, LoadOutcome, MonotonicClock
from service.bench.trace import RequestTrace
from service.bench.transport import GenerationSettings, Transport
from service.bench.workload import BenchRequest, RequestStream, WorkloadShape, generate_requests

REQUEST_TIMEOUT_S = 120.0


class Level(msgspec.Struct, frozen=True):
    """A closed loop. input_len, output_len: as `tessera bench` takes them."""

    name: str
    num_streams: int
    num_requests: int
    input_len: str
    output_len: str
    is_warm_up: bool = False


class Share(msgspec.Struct, frozen=True):
    """The part of a level that process `index` of `count` runs."""

    index: int = 0
    count: int = 1

    def of(self, total: int) -> int:
        """This process's part of `total` things dealt in turn."""
        return (total - self.index + self.count - 1) // self.count


class TraceRecord(msgspec.Struct, array_like=True):
    """A RequestTrace as it travels between processes of this benchmark."""

    due_s: float
    started_s: float
    ended_s: float
    event_times_s: list[float]
    event_tokens: list[int]
    num_input_tokens: int
    num_output_tokens: int
    error_code: str | None
    error_message: str

    @classmethod
    def of(cls, trace: RequestTrace) -> "TraceRecord":
        return cls(
            trace.due_s,
            trace.started_s,
            trace.ended_s,
            trace.event_times_s.tolist(),
            trace.event_tokens.tolist(),
            trace.num_input_tokens,
            trace.num_output_tokens,
            trace.error_code,
            trace.error_message,
        )

    def to_trace(self) -> RequestTrace:
        return RequestTrace(
            self.due_s,
            self.started_s,
            self.ended_s,
            array("d", self.event_times_s),
            array("q", self.event_tokens),
            self.num_input_tokens,
            self.num_output_tokens,
            error_code=self.error_code,
            error_message=self.error_message,
        )


class RunRecord(msgspec.Struct):
    """What one process saw of one level. cpu_s: its own user and system time during the run."""

    traces: list[TraceRecord]
    loop_lags_s: list[float]
    cpu_s: float


def merge_records(records: list[RunRecord]) -> LoadOutcome:
    """All clients of a machine read one clock, so their traces are of one run."""
    traces = [trace.to_trace() for record in records for trace in record.traces]
    traces.sort(key=lambda trace: trace.due_s)
    return LoadOutcome(traces, [lag for record in records for lag in record.loop_lags_s])


def shape_of(level: Level, vocab_size: int, seed: int) -> WorkloadShape:
    return WorkloadShape(
        parse_length(level.input_len), parse_length(level.output_len), vocab_size, seed=seed
    )


def requests_of(level: Level, vocab_size: int, seed: int, share: Share) -> Iterator[BenchRequest]:
    """This process's requests of a level, which has an end."""
    stream = RequestStream.WARMUP if level.is_warm_up else RequestStream.MEASURED
    requests = generate_requests(shape_of(level, vocab_size, seed), stream)
    return itertools.islice(requests, share.index, level.num_requests, share.count)


def fresh_settings() -> GenerationSettings:
    """Greedy, exactly as long as asked, and no prefix of an earlier process in the cache."""
    return GenerationSettings(cache_salt=secrets.token_hex(8))


async def run_level(
    level: Level, vocab_size: int, seed: int, transport: Transport, share: Share
) -> RunRecord:
    """Run this process's share of a level against a connected transport."""
    generator = LoadGenerator(
        transport.send, MonotonicClock(), Extent(None, timeout_s=REQUEST_TIMEOUT_S)
    )
    requests = list(requests_of(level, vocab_size, seed, share))
    started_s = _cpu_s()
    outcome = await generator.closed_loop(iter(requests), share.of(level.num_streams))
    return RunRecord(
        [TraceRecord.of(trace) for trace in outcome.traces],
        outcome.loop_lags_s,
        _cpu_s() - started_s,
    )


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
