"""The phases of an engine's work, one after the other: full prefill steps, then decode steps.

Knows the engine's public face and which profiler suits its device.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention.hardware import measured_limits
from attention.roofline import HardwareLimits
from attention.selection import detect_device
from service.bench.profile.breakdown import Breakdown
from service.bench.profile.cpu_steps import InlineExecutor, profile_cpu_steps
from service.bench.profile.cuda_steps import profile_cuda_steps
from service.bench.profile.floor import (
    ModelCost,
    StepFloor,
    StepShape,
    model_cost,
)
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.loading.model_folder import read_hf_config, resolve_model_folder
from workers.parallel.group import SingleRank
from workers.runner.executor import StepExecutor
from workers.runner.factory import make_model_runner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams

NUM_SETTLING_STEPS = 8


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to profile. streams: numbers of streams in decode. context_tokens: of each stream's
    prompt. num_steps: steps a phase is averaged over."""

    streams: tuple[int, ...] = (1, 64, 256)
    context_tokens: int = 1024
    num_steps: int = 16


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """One phase. step_s: the mean step by the host's clock, without a profiler. floor: None where
    the device's limits are unknown."""

    title: str
    step_s: float
    breakdown: Breakdown
    floor: StepFloor | None


class ProfileSession:
    """An engine of its own, without a prefix cache. Raises what Engine.from_config raises."""

    def __init__(
        self, config: EngineConfig, plan: ProfilePlan, limits: HardwareLimits | None
    ) -> None:
        config = replace(config, enable_prefix_cache=False)
        device = resolve_device(config)
        self._plan = plan
        self._limits = limits or measured_limits(detect_device(device))
        self._max_step_tokens = config.max_step_tokens
        self._max_running_requests = config.max_running_requests
        self._engine, self._profile = _load(config, device)
        info = self._engine.info
        self._vocab_size = info.vocab_size
        self._context_tokens = min(plan.context_tokens, info.max_request_len // 2)
        hf_config = read_hf_config(resolve_model_folder(config.model))
        self._cost: ModelCost = model_cost(hf_config, getattr(torch, info.dtype))
        self._rng = random.Random(0)

    def close(self) -> None:
        self._engine.close()

    def phases(self) -> Iterator[PhaseProfile]:
        """Prefill first, then every number of streams that may run at once; as they are done."""
        yield self._prefill()
        for num_streams in self._plan.streams:
            if num_streams <= self._max_running_requests:
                yield self._decode(num_streams)

    def _prefill(self) -> PhaseProfile:
        """Steps full of prompts, after one to warm up; timed first, then profiled."""
        per_step = max(1, self._max_step_tokens // self._context_tokens)
        num_steps = 2
        ids = self._submit("prefill", per_step * (3 + 2 * num_steps), 1)
        self._engine.step()
        step_s = self._seconds(num_steps)
        breakdown = self._profile(self._engine.step, num_steps)
        self._drop(ids)
        lengths = np.full(per_step, self._context_tokens, dtype=np.int32)
        title = f"prefill, {per_step} x {self._context_tokens}"
        return PhaseProfile(title, step_s, breakdown, self._floor(StepShape(lengths, lengths)))

    def _decode(self, num_streams: int) -> PhaseProfile:
        num_steps = self._plan.num_steps
        # More tokens than are waited for: nothing ends before it is dropped.
        max_tokens = self._engine.info.max_request_len - self._context_tokens
        ids = self._submit(f"decode-{num_streams}", num_streams, max_tokens)
        while self._engine.stats().queued_tokens:
            self._engine.step()
        for _ in range(NUM_SETTLING_STEPS):
            self._engine.step()
        step_s = self._seconds(num_steps)
        breakdown = self._profile(self._engine.step, num_steps)
        context = self._engine.stats().running_tokens // num_streams
        self._drop(ids)
        lengths = np.full(num_streams, context, dtype=np.int32)
        shape = StepShape(lengths, np.ones(num_streams, dtype=np.int32))
        title = f"decode, {num_streams} x {context}"
        return PhaseProfile(title, step_s, breakdown, self._floor(shape))

    def _floor(self, shape: StepShape) -> StepFloor | None:
        return None if self._limits is None else self._cost.floor(shape, self._limits)

    def _submit(self, name: str, number: int, max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = [f"profile-{name}-{index}" for index in range(number)]
        for request_id in ids:
            prompt = [self._rng.randrange(self._vocab_size) for _ in range(self._context_tokens)]
            self._engine.submit(GenerateRequest(request_id, prompt, params))
        return ids

    def _drop(self, ids: list[str]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _seconds(self, num_steps: int) -> float:
        """A step commits the one before: as many end within the time as are launched in it."""
        start_s = time.perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        return (time.perf_counter() - start_s) / num_steps


Profile = Callable[[Callable[[], object], int], Breakdown]


def _load(config: EngineConfig, device: torch.device) -> tuple[Engine, Profile]:
    """An engine and the profiler of its device."""
    runner = make_model_runner(config, SingleRank(), device, _ignore_progress)
    if device.type == "cuda":
        return Engine.of_runner(config, runner), profile_cuda_steps
    inline: list[InlineExecutor] = []

    def wrap(executor: StepExecutor) -> StepExecutor:
        inline.append(InlineExecutor(runner.run, executor))
        return inline[0]

    engine = Engine.of_runner(config, runner, wrap_executor=wrap)
    return engine, lambda step, num_steps: profile_cpu_steps(step, inline[0], num_steps)


def _ignore_progress(bytes_done: int, bytes_total: int) -> None:
    """Nobody watches."""
