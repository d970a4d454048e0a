"""Where a decode step's device time goes: kernels of some steps by name, from torch's profiler.

    python3 -m benchmarks.h200.step_profile benchmarks/h200/models/llama-3.1-8b.json

Prints, for each number of streams, microseconds a step by which every kernel moved the end of the
work, idle time before it included, and the host's own time in each part of a step.
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
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from workers.config import EngineConfig
from workers.engine import Engine
from workers.protocol import GenerateRequest
from workers.sampling.params import SamplingParams

NUM_STEPS = 16
NUM_SETTLING_STEPS = 8
PREFILL_STEP_TOKENS = 8192
MAX_NAME = 90


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


def profile_steps(engine: Engine, num_steps: int) -> list[tuple[str, float, float]]:
    """(name, start in us, duration in us) of every kernel of some steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            engine.step()
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


def report_host(engine: Engine, num_streams: int) -> None:
    clock = HostClock()
    executor, scheduler = engine._executor, engine._scheduler
    for owner, name in ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch")):
        clock.wrap(owner, name)
    start_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    whole_us = (time.perf_counter() - start_s) / NUM_STEPS * 1e6
    parts = ", ".join(
        f"{name} {statistics.median(calls) * 1e6:.0f} (most {max(calls) * 1e6:.0f})"
        for name, calls in clock.seconds.items()
    )
    print(f"-- {num_streams} streams, host: step {whole_us:.0f} us, of which {parts}")
    for owner, name in ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch")):
        delattr(owner, name)


def report_functions(engine: Engine) -> None:
    """The host's functions of some decode steps by their own time, slowed by the measurement."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def report_prefill(engine: Engine) -> None:
    """Two full steps of prompts of 1,024 tokens, after one to warm up."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(0)
    for index in range(3 * PREFILL_STEP_TOKENS // 1024):
        prompt = [rng.randrange(10, 100_000) for _ in range(1024)]
        engine.submit(GenerateRequest(f"prefill-{index}", prompt, params))
    engine.step()
    report("prefill of 8 x 1024", 2, profile_steps(engine, 2))
    while engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    parser.add_argument("--functions", action="store_true", help="profile the host's functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(arguments.config, Path(scratch) / "config.json")
        engine = Engine.from_config(
            EngineConfig(
                model=scratch,
                load_format="dummy",
                max_context_len=8192,
                attention_backend=arguments.backend,
                enable_prefix_cache=False,
            )
        )
    for num_streams, prompt_tokens in ((1, 1024), (64, 1024), (256, 128)):
        start_streams(engine, num_streams, prompt_tokens)
        report_host(engine, num_streams)
        report(f"{num_streams} streams", NUM_STEPS, profile_steps(engine, NUM_STEPS))
        if arguments.functions:
            report_functions(engine)
        for index in range(num_streams):
            engine.abort(f"{num_streams}-{index}")
        while engine.has_work:
            engine.step()
    report_prefill(engine)
    engine.close()


if __name__ == "__main__":
    main()
