"""Figures of a run from its traces: percentiles, throughput, errors by code.

Pure. Only requests that ended well count in latencies and throughput; the others are counted by
code. Knows no tables.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.bench.load import LoadOutcome
from service.bench.trace import RequestTrace

# Beyond this lateness of the client at p99, its figures say more about it than about the server.
MAX_CREDIBLE_LAG_S = 0.01

Samples = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of samples in seconds. Percentiles interpolate linearly, as numpy does by default."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run. None stands where there was nothing to measure.

    ttft_s: due to first token. inter_token_s: a gap between two deliveries, shared by the tokens of
    the second. time_per_output_token_s: per request, its mean after the first token.
    end_to_end_s: due to end. client_lag_s: due to sent, open loop only; event_loop_lag_s: lateness
    of the client's own timers. elapsed_s: first due to last end.
    """

    num_requests: int
    num_ok: int
    errors: dict[str, int]
    example_error: str
    elapsed_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    tokens_per_delivery: float | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Distribution | None
    inter_token_s: Distribution | None
    time_per_output_token_s: Distribution | None
    end_to_end_s: Distribution | None
    client_lag_s: Distribution | None
    event_loop_lag_s: Distribution | None

    @property
    def is_client_late(self) -> bool:
        """Whether the client was too busy for its figures to be trusted."""
        lags = (self.client_lag_s, self.event_loop_lag_s)
        return any(lag is not None and lag.p99 > MAX_CREDIBLE_LAG_S for lag in lags)


def distribution(samples: npt.ArrayLike) -> Distribution | None:
    """None of no samples."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return Distribution(values.size, float(values.mean()), p50, p90, p95, p99, float(values.max()))


def inter_token_samples(trace: RequestTrace) -> Samples:
    """One sample a token after the first delivery: the gap before it over the tokens it brought.

    A delivery whose number of tokens is unknown counts as one token.
    """
    gaps = np.diff(np.asarray(trace.event_times_s, dtype=np.float64))
    counts = np.maximum(np.asarray(trace.event_tokens, dtype=np.int64)[1:], 1)
    return np.repeat(gaps / counts, counts)


def summarize(outcome: LoadOutcome, *, is_open_loop: bool) -> BenchResult:
    """Condense a run."""
    traces = outcome.traces
    done = [trace for trace in traces if trace.is_ok]
    errors = Counter(trace.error_code for trace in traces if trace.error_code is not None)
    elapsed_s = _elapsed(traces)
    lags = [trace.started_s - trace.due_s for trace in traces] if is_open_loop else []
    num_input = sum(trace.num_input_tokens for trace in done)
    num_output = sum(trace.num_output_tokens for trace in done)
    return BenchResult(
        num_requests=len(traces),
        num_ok=len(done),
        errors=dict(errors.most_common()),
        example_error=next((trace.error_message for trace in traces if not trace.is_ok), ""),
        elapsed_s=elapsed_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=sum(trace.num_cached_tokens for trace in done),
        tokens_per_delivery=_ratio(num_output, sum(len(trace.event_times_s) for trace in done)),
        requests_per_s=_ratio(len(done), elapsed_s) or 0.0,
        input_tokens_per_s=_ratio(num_input, elapsed_s) or 0.0,
        output_tokens_per_s=_ratio(num_output, elapsed_s) or 0.0,
        ttft_s=distribution([t.event_times_s[0] - t.due_s for t in done if t.event_times_s]),
        inter_token_s=distribution(_concatenate(map(inter_token_samples, done))),
        time_per_output_token_s=distribution(
            [_time_per_output_token(t) for t in done if _has_decode(t)]
        ),
        end_to_end_s=distribution([t.ended_s - t.due_s for t in done]),
        client_lag_s=distribution(lags),
        event_loop_lag_s=distribution(outcome.loop_lags_s),
    )


def _elapsed(traces: Sequence[RequestTrace]) -> float:
    if not traces:
        return 0.0
    return max(t.ended_s for t in traces) - min(t.due_s for t in traces)


def _ratio(count: float, whole: float) -> float | None:
    return count / whole if whole else None


def _has_decode(trace: RequestTrace) -> bool:
    return len(trace.event_times_s) > 1 and trace.num_output_tokens > _first_tokens(trace)


def _time_per_output_token(trace: RequestTrace) -> float:
    decode_s = trace.event_times_s[-1] - trace.event_times_s[0]
    return decode_s / (trace.num_output_tokens - _first_tokens(trace))


def _first_tokens(trace: RequestTrace) -> int:
    return max(trace.event_tokens[0], 1)


def _concatenate(parts: Iterable[Samples]) -> Samples:
    return np.concatenate([np.empty(0), *parts])
