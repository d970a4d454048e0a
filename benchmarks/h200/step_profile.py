"""Where a decode step's device time goes: kernels of some steps by name, from torch's profiler.

    PYTHONPATH=. python3 benchmarks/h200/step_profile.py benchmarks/h200/models/llama-3.1-8b.json

Prints, for each number of streams, microseconds a step of every kernel, their sum, the device's
idle time between them, and the host's own time in each part of a step.
"""

import argparse
import random
import shutil
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
MAX_NAME = 90


class HostClock:
    """Seconds spent inside wrapped calls, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap(self, owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: object) -> object:
            start_s = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - start_s

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


def profile_steps(engine: Engine) -> list[tuple[str, float, float]]:
    """(name, start in us, duration in us) of every kernel of NUM_STEPS steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def busy_us(kernels: list[tuple[str, float, float]]) -> float:
    """Time in which at least one kernel ran."""
    total, reached = 0.0, 0.0
    for _, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    return total


def report(num_streams: int, kernels: list[tuple[str, float, float]]) -> None:
    durations: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, _, duration in kernels:
        durations[name[:MAX_NAME]] += duration
        counts[name[:MAX_NAME]] += 1
    first = min(start for _, start, _ in kernels)
    last = max(start + duration for _, start, duration in kernels)
    busy = busy_us(kernels)
    print(
        f"== {num_streams} streams: {(last - first) / NUM_STEPS:.0f} us a step, "
        f"busy {busy / NUM_STEPS:.0f}, sum of kernels {sum(durations.values()) / NUM_STEPS:.0f}"
    )
    for name, duration in durations.most_common(16):
        print(f"{duration / NUM_STEPS:9.1f} us {counts[name] / NUM_STEPS:6.1f} x  {name}")


def report_host(engine: Engine, num_streams: int) -> None:
    clock = HostClock()
    executor, scheduler = engine._executor, engine._scheduler
    for owner, name in ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch")):
        clock.wrap(owner, name)
    start_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    whole_us = (time.perf_counter() - start_s) / NUM_STEPS * 1e6
    parts = ", ".join(f"{k} {v / NUM_STEPS * 1e6:.0f}" for k, v in clock.seconds.items())
    print(f"-- {num_streams} streams, host: step {whole_us:.0f} us, of which {parts}")
    for owner, name in ((scheduler, "schedule"), (scheduler, "commit"), (executor, "launch")):
        delattr(owner, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(arguments.config, Path(scratch) / "config.json")
        engine = Engine.from_config(
            EngineConfig(
                model=scratch,
                load_format="dummy",
                max_context_len=8192,
                enable_prefix_cache=False,
            )
        )
    for num_streams, prompt_tokens in ((1, 1024), (64, 1024), (256, 128)):
        start_streams(engine, num_streams, prompt_tokens)
        report_host(engine, num_streams)
        report(num_streams, profile_steps(engine))
        for index in range(num_streams):
            engine.abort(f"{num_streams}-{index}")
        while engine.has_work:
            engine.step()
    engine.close()


if __name__ == "__main__":
    main()
