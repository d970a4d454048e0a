"""Profiling steps on a CPU: attention by the engine's own timer, products by torch's profiler."""

import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from service.bench.profile.breakdown import Breakdown
from service.bench.profile.kernel_groups import Group, is_cpu_gemm
from workers.constraints.masks import StepMasks
from workers.runner.executor import PendingStep, RunStep, StepExecutor, StepOutcome
from workers.scheduler.plan import StepPlan, StepResult

_US = 1e-6


class _FinishedStep:
    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        return self._outcome.result

    def outcome(self) -> StepOutcome:
        return self._outcome


class InlineExecutor:
    """Runs each step where it is launched, on the thread that a profiler watches.

    inner: the executor that it stands in for, closed with it.
    """

    def __init__(self, run_step: RunStep, inner: StepExecutor) -> None:
        self._run_step = run_step
        self._inner = inner
        self.outcomes: list[StepOutcome] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        outcome = self._run_step(plan)
        self.outcomes.append(outcome)
        return _FinishedStep(outcome)

    def named(self, plan: StepPlan) -> StepPlan:
        return plan

    def provide(self, masks: StepMasks) -> None:
        self._inner.provide(masks)

    def forget_masks(self) -> None:
        self._inner.forget_masks()

    def prepare_while_idle(self) -> bool:
        return False

    def close(self) -> None:
        self._inner.close()


def profile_cpu_steps(
    step: Callable[[], object], executor: InlineExecutor, num_steps: int, num_largest: int = 8
) -> Breakdown:
    """The mean of num_steps calls of step; idle is what the host does besides the model."""
    executor.outcomes.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            step()
        whole_s = time.perf_counter() - start_s
    operators = sorted(profiler.key_averages(), key=lambda op: -op.self_cpu_time_total)
    gemm_s = sum(op.self_cpu_time_total for op in operators if is_cpu_gemm(op.key)) * _US
    attention_s = sum(record.seconds for o in executor.outcomes for record in o.attention)
    model_s = sum(outcome.finished_s - outcome.started_s for outcome in executor.outcomes)
    seconds = {
        Group.ATTENTION: attention_s,
        Group.GEMM: gemm_s,
        Group.OTHER: max(0.0, model_s - attention_s - gemm_s),
        Group.IDLE: max(0.0, whole_s - model_s),
    }
    return Breakdown(
        {group: value / num_steps for group, value in seconds.items()},
        [(op.key, op.self_cpu_time_total * _US / num_steps) for op in operators[:num_largest]],
    )
