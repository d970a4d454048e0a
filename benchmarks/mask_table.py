"""What a MaskTimeline saw, in lines: a quantity each, in microseconds."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.mask_timeline import Batch, MaskTimeline, Step

QUANTILES = (0.5, 0.9, 0.99, 1.0)
WORK = (
    *("turn", "finish", "provide", "forced", "schedule", "launch"),
    *("device", "commit", "consume", "begin"),
)


def quantiles(values_s: Sequence[float]) -> str:
    if not len(values_s):
        return "none"
    own = np.array(values_s) * 1e6
    return f"mean {own.mean():7.0f} | " + " ".join(
        f"{value:7.0f}" for value in np.quantile(own, QUANTILES)
    )


def _line(what: str, values_s: Sequence[float]) -> str:
    return f"  {what:<34} {quantiles(values_s)}"


BATCH_TIMES: dict[str, Callable[[Batch], float]] = {
    "asked to thread running": lambda one: one.started_s - one.submitted_s,
    "native, wall": lambda one: one.native_ended_s - one.native_started_s,
    "native, processor, all threads": lambda one: sum(one.native_threads_s),
    "native, processor, busiest": lambda one: max(one.native_threads_s, default=0.0),
    "Python around it, wall": lambda one: (
        one.ended_s - one.started_s - one.native_ended_s + one.native_started_s
    ),
    "Python's thread, processor": lambda one: one.own_cpu_s,
    "asked to done": lambda one: one.ended_s - one.submitted_s,
}


def summary(timeline: MaskTimeline) -> dict[str, float]:
    """A few of these as numbers: what is compared between variations."""
    own = [one for one in timeline.batches if one.native_ended_s]
    if not own:
        return {}
    num_asked = sum(one.num_asked for one in timeline.steps)
    num_late = sum(one.num_late for one in timeline.steps)
    native_us = np.array([one.native_ended_s - one.native_started_s for one in own]) * 1e6
    return {
        "late": round(num_late / max(num_asked, 1), 4),
        "mask_cpu_us": round(timeline.native_cpu_s / sum(one.num_rows for one in own) * 1e6),
        "native_p50_us": round(float(np.median(native_us))),
        "native_p99_us": round(float(np.percentile(native_us, 99))),
    }


def batch_lines(timeline: MaskTimeline) -> Iterator[str]:
    """Of those that the native threads made: others were known already."""
    own = [one for one in timeline.batches if one.native_ended_s]
    num_masks = sum(one.num_rows for one in own)
    each_us = timeline.native_cpu_s / max(num_masks, 1) * 1e6
    yield f"  {num_masks} masks, {each_us:.0f} us of processor each"
    names = sorted({one.thread for one in own})
    for name in names:
        ones = [one for one in own if one.thread == name]
        num_rows = sum(one.num_rows for one in ones)
        work_s = sum(sum(one.native_threads_s) for one in ones)
        wall_s = sum(one.native_ended_s - one.native_started_s for one in ones)
        yield (
            f"  batches of {name}: {len(ones)} of {num_rows / len(ones):.1f} rows, "
            f"{wall_s / len(ones) * 1e6:.0f} us each, {work_s / wall_s:.2f} processors at work"
        )
    for what, of in BATCH_TIMES.items():
        yield _line(what, [of(one) for one in own])


def longest_lines(steps: Sequence[Step], num_longest: int = 8) -> Iterator[str]:
    """Of the turns that took longest from one asking for masks to the next: what they did."""
    periods_s = np.diff([one.begun_s for one in steps])
    for index in np.argsort(periods_s)[::-1][:num_longest].tolist():
        step = steps[index + 1]
        parts = " ".join(f"{what} {step.wall_s.get(what, 0.0) * 1e6:.0f}" for what in WORK[1:])
        yield (
            f"  turn {index + 1}: {periods_s[index] * 1e6:.0f} = {parts}; {step.ran_rows} rows ran "
            f"{step.ran_s * 1e6:.0f}, then {step.num_rows} rows; {step.num_late} late"
        )


def step_lines(steps: Sequence[Step]) -> Iterator[str]:
    num_asked = sum(one.num_asked for one in steps)
    num_late = sum(one.num_late for one in steps)
    num_with = sum(one.num_late > 0 for one in steps)
    yield f"  {len(steps)} steps, {num_asked} rows, {num_late} late, in {num_with} steps"
    begun = [one.begun_s for one in steps]
    yield _line("period", np.diff(begun).tolist())
    yield _line("asked to free until", [one.free_s for one in steps])
    yield _line("asked to given up", [one.patience_s for one in steps])
    yield _line("asked to needed", [one.needed_s for one in steps])
    ((usual, _),) = Counter(one.ran_rows for one in steps).most_common(1)
    yield _line(f"ran, up to {usual} rows", [one.ran_s for one in steps if one.ran_rows <= usual])
    yield _line("ran, more rows", [one.ran_s for one in steps if one.ran_rows > usual])
    for what in WORK:
        wall = [one.wall_s.get(what, 0.0) for one in steps]
        cpu = [one.cpu_s.get(what, 0.0) for one in steps]
        yield _line(f"engine: {what}, wall", wall)
        if what in ("turn", "commit", "consume", "forced"):
            idle = np.maximum(np.subtract(wall, cpu), 0.0).tolist()
            yield _line(f"engine: {what}, not on processor", idle)
    yield from longest_lines(steps)
    consumed = sum(one.num_consumed for one in steps)
    if consumed:
        each_s = sum(one.wall_s.get("consume", 0.0) for one in steps) / consumed
        yield f"  a token gone past: {each_s * 1e6:.1f} us, {consumed} of them"
