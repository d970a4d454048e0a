"""Where a decode step's device time goes: kernels of some steps by name, from torch's profiler.

    python3 -m benchmarks.h200.step_profile benchmarks/h200/models/llama-3.1-8b.json
        [--decode-only --streams 1:1024 --places]

Prints the time to the first token of single prompts and, for each number of streams, microseconds
a step by which every kernel moved the end of the work, idle time before it included, and the host's
own time in each part of a step; with --places the same of a layer's kernels in their order.
"""

import argparse
import cProfile
import pstats
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

NUM_STEPS = 16
NUM_SETTLING_STEPS = 8
PREFILL_STEP_TOKENS = 8192
MAX_NAME = 90
ATTENTION = "attend"
"""In the names of decode steps' attention kernels, one a layer."""
SINGLE_PROMPTS = (128, 1024)
STREAMS = ((1, 1024), (64, 1024), (256, 128))
"""(streams, prompt tokens of each)"""
MIXED_PROMPT_TOKENS = 300
NUM_FREED = 8
"""Slots that mixed steps take from the last streams."""


class HostClock:
    """Seconds spent inside wrapped calls, by name, one entry a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: object) -> object:
            start_s = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - start_s)

        setattr(owner, name, timed)


def start_streams(engine: Engine, num_streams: int, prompt_tokens: int) -> None:
    rng = random.Random(num_streams)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for index in range(num_streams):
        prompt = [rng.randrange(10, 100_000) for _ in range(prompt_tokens)]
        engine.submit(GenerateRequest(f"{num_streams}-{index}", prompt, params))
    while engine.stats().queued_tokens:
        engine.step()
    for _ in range(NUM_SETTLING_STEPS):
        engine.step()


def profile_calls(step: Callable[[], object], num_calls: int) -> list[tuple[str, float, float]]:
    """(name, start in us, duration in us) of every kernel of some calls."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_calls):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def advances_us(kernels: list[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """How much later each kernel ended than all before it: its share of the critical path.

    Kernels overlap, dependent launches above all: durations add up to more than the time they take.
    """
    reached = min(start for _, start, _ in kernels)
    advances = []
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1] + kernel[2]):
        advances.append((name, max(0.0, start + duration - reached)))
        reached = max(reached, start + duration)
    return advances


def report(what: str, num_steps: int, kernels: list[tuple[str, float, float]]) -> None:
    shares: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, advance in advances_us(kernels):
        shares[name[:MAX_NAME]] += advance
        counts[name[:MAX_NAME]] += 1
    print(f"== {what}: {sum(shares.values()) / num_steps:.0f} us a step")
    for name, share in shares.most_common(14):
        each = share / counts[name]
        print(f"{share / num_steps:9.1f} us {counts[name] / num_steps:6.1f} x {each:7.2f}  {name}")


def places_us(advances: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """A layer's kernels in their order, from one attention to the next, with the medians of their
    advances, in us, of all layers that have as many kernels as most."""
    starts = [index for index, (name, _) in enumerate(advances) if ATTENTION in name]
    layers = [advances[start:stop] for start, stop in pairwise(starts)]
    if not layers:
        return []
    usual = statistics.mode(len(layer) for layer in layers)
    alike = [layer for layer in layers if len(layer) == usual]
    return [
        (kernels[0][0], statistics.median(advance for _, advance in kernels))
        for kernels in zip(*alike, strict=True)
    ]


def report_places(kernels: list[tuple[str, float, float]]) -> None:
    places = places_us(advances_us(kernels))
    print(f"== a layer, {sum(advance for _, advance in places):.1f} us")
    for name, advance in places:
        print(f"{advance:9.2f} us  {name[:MAX_NAME]}")


def report_host(engine: Engine, num_streams: int) -> None:
    executor, scheduler = engine._executor, engine._scheduler
    parts = ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch"))
    report_calls(f"{num_streams} streams", HostClock(), parts, engine.step)


def report_mixed(engine: Engine, num_streams: int, has_functions: bool) -> None:
    """Steps in which a new prompt comes beside the streams that decode."""
    for index in range(NUM_FREED):
        engine.abort(f"{num_streams}-{index}")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(1)
    numbers = count()

    def step() -> None:
        prompt = [rng.randrange(10, 100_000) for _ in range(MIXED_PROMPT_TOKENS)]
        engine.submit(GenerateRequest(f"beside-{next(numbers)}", prompt, params))
        engine.step()

    for _ in range(NUM_SETTLING_STEPS):
        step()
    executor, scheduler = engine._executor, engine._scheduler
    parts = ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch"))
    report_calls(f"mixed with {MIXED_PROMPT_TOKENS}", HostClock(), parts, step)
    report("mixed", NUM_STEPS, profile_calls(step, NUM_STEPS))
    if has_functions:
        report_functions(step)


def report_calls(
    what: str, clock: HostClock, parts: tuple[tuple[object, str], ...], step: Callable[[], object]
) -> None:
    """The host's time in some steps, and in each part of them."""
    for owner, name in parts:
        clock.wrap(owner, name)
    start_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    whole_us = (time.perf_counter() - start_s) / NUM_STEPS * 1e6
    told = ", ".join(
        f"{name} {statistics.median(calls) * 1e6:.0f} (most {max(calls) * 1e6:.0f})"
        for name, calls in clock.seconds.items()
    )
    print(f"-- {what}, host: step {whole_us:.0f} us, of which {told}")
    for owner, name in parts:
        delattr(owner, name)


def report_functions(run: Callable[[], object]) -> None:
    """The host's functions of some calls by their own time, slowed by the measurement."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        run()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def report_first_token(engine: Engine, prompt_tokens: int, has_functions: bool) -> None:
    """Single prompts: the time to a token, and the host's to launch the step."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(prompt_tokens)

    def first_token() -> None:
        engine.generate([[rng.randrange(10, 100_000) for _ in range(prompt_tokens)]], params)

    first_token()
    parts = ((engine._executor, "launch"), (engine, "generate"))
    report_calls(f"one prompt of {prompt_tokens}", HostClock(), parts, first_token)
    report(f"one prompt of {prompt_tokens}", 1, profile_calls(first_token, 1))
    if has_functions:
        report_functions(first_token)


def report_prefill(engine: Engine) -> None:
    """Two full steps of prompts of 1,024 tokens, after one to warm up."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(0)
    for index in range(3 * PREFILL_STEP_TOKENS // 1024):
        prompt = [rng.randrange(10, 100_000) for _ in range(1024)]
        engine.submit(GenerateRequest(f"prefill-{index}", prompt, params))
    engine.step()
    report("prefill of 8 x 1024", 2, profile_calls(engine.step, 2))
    while engine.has_work:
        engine.step()


def streams_of(text: str) -> tuple[int, int]:
    """256:1024 -> (256, 1024)."""
    num_streams, prompt_tokens = text.split(":")
    return int(num_streams), int(prompt_tokens)


def build(arguments: argparse.Namespace) -> Engine:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(arguments.config, Path(scratch) / "config.json")
        config = EngineConfig(
            model=scratch,
            load_format="dummy",
            tp_size=arguments.tp,
            max_context_len=8192,
            attention_backend=arguments.backend,
            enable_prefix_cache=False,
        )
        return build_local_engine(config, lambda done, total: None)


def settle(engine: Engine) -> None:
    start_s = time.perf_counter()
    num_turns = 0
    while engine.prepare_while_idle():
        num_turns += 1
    print(f"-- prepared in {num_turns} turns, {time.perf_counter() - start_s:.1f} s")


def report_streams(
    engine: Engine, num_streams: int, arguments: argparse.Namespace, is_last: bool
) -> None:
    """Streams that have started. is_last: mixed steps may follow, which take some of them."""
    report_host(engine, num_streams)
    kernels = profile_calls(engine.step, NUM_STEPS)
    report(f"{num_streams} streams", NUM_STEPS, kernels)
    if arguments.places:
        report_places(kernels)
    if arguments.functions:
        report_functions(engine.step)
    if is_last and not arguments.decode_only:
        report_mixed(engine, num_streams, arguments.functions)
    for index in range(num_streams):
        engine.abort(f"{num_streams}-{index}")
    while engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    parser.add_argument("--tp", type=int, default=1, help="rank 0 of so many")
    parser.add_argument("--prompts-only", action="store_true", help="no decode steps")
    parser.add_argument("--decode-only", action="store_true", help="no prompts, no mixed steps")
    parser.add_argument(
        "--streams",
        nargs="+",
        type=streams_of,
        default=STREAMS,
        metavar="N:TOKENS",
        help="so many streams of prompts of so many tokens, one after the other",
    )
    parser.add_argument("--places", action="store_true", help="a layer's kernels in their order")
    parser.add_argument("--functions", action="store_true", help="profile the host's functions")
    arguments = parser.parse_args()
    engine = build(arguments)
    settle(engine)
    for prompt_tokens in () if arguments.decode_only else SINGLE_PROMPTS:
        report_first_token(engine, prompt_tokens, arguments.functions)
    streams = [] if arguments.prompts_only else arguments.streams
    for num_streams, prompt_tokens in streams:
        start_streams(engine, num_streams, prompt_tokens)
        report_streams(engine, num_streams, arguments, num_streams == streams[-1][0])
    if not arguments.decode_only:
        report_prefill(engine)
    engine.close()


if __name__ == "__main__":
    main()
