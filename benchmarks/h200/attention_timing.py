"""What timing attention inside CUDA graphs costs, and whether its sum is the profiler's.

    python3 -m benchmarks.h200.attention_timing benchmarks/h200/models/llama-3.1-8b.json

One engine decodes with and without timed replays, in blocks by turns (off, on, on, off: contexts
grow while it runs, so that only such a group compares like with like), and prefills the same way.
Then the events' sum over layers stands beside the durations of the attention kernels that
torch.profiler saw, in plain and in timed replays.
"""

import argparse
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attention.timing import AttentionTimer, UntimedAttention
from benchmarks.h200.step_profile import advances_us, profile_calls
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import AttentionRecord, StepRecord
from workers.engine.protocol import GenerateRequest
from workers.graphs.decode_graphs import DecodeGraphs
from workers.parallel.group import SingleRank
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.sizing import make_timer
from workers.sampling.params import SamplingParams

NUM_STREAMS = 64
PROMPT_TOKENS = 1024
NUM_GROUPS = 4
NUM_PROFILED_STEPS = 16
PREFILLS_PER_BLOCK = 3
ATTENTION_KERNELS = r"flash|attend|decode|join_row|prepare_varlen"
MAX_NAME = 80


class Records:
    """Keeps the attention of every step."""

    def __init__(self) -> None:
        self.attention: list[AttentionRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.attention += record.attention

    def take(self, phase: str) -> list[AttentionRecord]:
        taken = [record for record in self.attention if record.phase == phase]
        self.attention = []
        return taken


class Bench:
    """An engine whose timing can be turned on and off."""

    def __init__(self, config: EngineConfig) -> None:
        self.records = Records()
        runner = CudaModelRunner(config, SingleRank(), torch.device("cuda", 0), lambda *_: None)
        if runner._graphs is None:
            raise SystemExit("this backend or model runs without CUDA graphs")
        self.runner = runner
        self.graphs: DecodeGraphs = runner._graphs
        self.engine = Engine.of_runner(config, runner, on_step=self.records.on_step)
        device = torch.device("cuda", 0)
        self._timers: dict[bool, AttentionTimer] = {
            True: make_timer(runner._backend, device),
            False: UntimedAttention(runner._backend),
        }

    def set_interval(self, interval_steps: int) -> None:
        self.graphs._twins.turns.interval_steps = interval_steps
        self.runner._timer = self._timers[interval_steps > 0]

    def submit(self, name: str, num: int, prompt_tokens: int, max_tokens: int) -> None:
        rng = random.Random(num)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for index in range(num):
            prompt = [rng.randrange(10, 100_000) for _ in range(prompt_tokens)]
            self.engine.submit(GenerateRequest(f"{name}-{index}", prompt, params))

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def compare_by_turns(
    what: str, set_timing: Callable[[bool], None], run_block: Callable[[], None]
) -> None:
    """Print both medians of a block's seconds and the difference of each group of four blocks."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    differences = []
    for _ in range(NUM_GROUPS):
        group = []
        for is_on in (False, True, True, False):
            set_timing(is_on)
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            run_block()
            torch.cuda.synchronize()
            group.append(time.perf_counter() - start_s)
            seconds[is_on].append(group[-1])
        off_s, on_s = group[0] + group[3], group[1] + group[2]
        differences.append((on_s / off_s - 1) * 100)
    shown = ", ".join(f"{difference:+.3f}" for difference in differences)
    print(
        f"{what}: off {statistics.median(seconds[False]):.4f} s, on "
        f"{statistics.median(seconds[True]):.4f} s a block; on over off, by group: {shown} %; "
        f"mean {statistics.mean(differences):+.3f} %"
    )


def report_captures(bench: Bench) -> None:
    taken: list[float] = []
    while bench.graphs._missing:
        start_s = time.perf_counter()
        bench.graphs.capture_next()
        taken.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    bench.graphs.capture_timed(NUM_STREAMS)
    twin_s = time.perf_counter() - start_s
    print(
        f"captures, ms of host time: first {taken[0] * 1e3:.0f}, {len(taken)} sizes of median "
        f"{statistics.median(taken) * 1e3:.0f}, most but the first {max(taken[1:]) * 1e3:.0f}; "
        f"twin of {NUM_STREAMS}: {twin_s * 1e3:.0f}"
    )


def report_events(bench: Bench, what: str) -> float:
    """Median microseconds of the timed steps since the last report."""
    records = bench.records.take("decode")
    if not records:
        raise SystemExit(f"{what}: no decode step was timed")
    micros = [record.seconds * 1e6 for record in records]
    rate = statistics.median(record.num_bytes / record.seconds for record in records)
    print(
        f"{what}: {len(records)} timed, median {statistics.median(micros):.0f} us over all layers "
        f"({min(micros):.0f} to {max(micros):.0f}), {rate / 1e12:.2f} TB/s of K and V"
    )
    return statistics.median(micros)


def profiled_attention_us(bench: Bench, what: str, pattern: str) -> tuple[float, float]:
    """Microseconds a step of attention kernels: their durations, and by how far they moved the end
    of the work. A dependent launch may wait, running, for its predecessor: durations count that.
    """
    kernels = profile_calls(bench.engine.step, NUM_PROFILED_STEPS)
    is_attention = re.compile(pattern, re.IGNORECASE).search
    totals: dict[str, float] = {}
    for name, _, duration in kernels:
        if is_attention(name):
            totals[name[:MAX_NAME]] = totals.get(name[:MAX_NAME], 0.0) + duration
    moved = sum(us for name, us in advances_us(kernels) if is_attention(name))
    advance = moved / NUM_PROFILED_STEPS
    total = sum(totals.values()) / NUM_PROFILED_STEPS
    print(
        f"{what}: attention kernels {total:.0f} us a step by duration, "
        f"{advance:.0f} us by how far they moved the end of the work"
    )
    for name, micros in sorted(totals.items(), key=lambda item: -item[1])[:6]:
        print(f"    {micros / NUM_PROFILED_STEPS:9.1f} us  {name}")
    return total, advance


def print_ratios(what: str, events_us: float, profiled_us: tuple[float, float]) -> None:
    durations, advances = (events_us / micros - 1 for micros in profiled_us)
    print(f"{what}: {durations:+.2%} of durations, {advances:+.2%} of advances")


def compare_with_profiler(bench: Bench, pattern: str) -> None:
    bench.set_interval(4)
    bench.records.take("decode")
    bench.steps(48)
    events_us = report_events(bench, "events, every 4th step")
    bench.set_interval(0)
    plain_us = profiled_attention_us(bench, "profiler, plain replays", pattern)
    print_ratios("events over the profiler's, plain replays", events_us, plain_us)
    bench.set_interval(1)
    # A twin is replayed again only when its last replay was read: without overlap, every step.
    bench.engine._enable_overlap = False
    bench.steps(4)
    bench.records.take("decode")
    twin_us = profiled_attention_us(bench, "profiler, timed replays", pattern)
    same_us = report_events(bench, "events of the same steps")
    print_ratios("events over the profiler's, same replays", same_us, twin_us)
    bench.engine._enable_overlap = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    default_interval = EngineConfig().attention_timing_interval_steps
    parser.add_argument("--interval", type=int, default=default_interval, help="steps of a block")
    parser.add_argument("--kernels", default=ATTENTION_KERNELS, help="names of attention kernels")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(arguments.config, Path(scratch) / "config.json")
        bench = Bench(
            EngineConfig(
                model=scratch,
                load_format="dummy",
                max_context_len=8192,
                attention_backend=arguments.backend,
                enable_prefix_cache=False,
            )
        )
    interval: int = arguments.interval
    report_captures(bench)

    def set_timing(is_on: bool) -> None:
        bench.set_interval(interval if is_on else 0)

    def prefill() -> None:
        bench.submit("prefill", 8 * PREFILLS_PER_BLOCK, PROMPT_TOKENS, 1)
        bench.finish()

    prefill()
    compare_by_turns(f"prefill, {PREFILLS_PER_BLOCK} x 8 x 1024", set_timing, prefill)
    bench.submit("stream", NUM_STREAMS, PROMPT_TOKENS, 8192 - PROMPT_TOKENS - 1)
    while bench.engine.stats().queued_tokens:
        bench.engine.step()
    bench.steps(16)
    compare_by_turns(
        f"decode, {NUM_STREAMS} streams, {interval} steps",
        set_timing,
        lambda: bench.steps(interval),
    )
    report_events(bench, f"events, every {interval}th step")
    compare_with_profiler(bench, arguments.kernels)


if __name__ == "__main__":
    main()
