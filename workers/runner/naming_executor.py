"""How steps whose drafts a rank proposes itself run beside the host: named first, then run.

Who makes masks of what a grammar allows has to know the drafts while the step runs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from workers.runner.executor import FutureStep, PendingStep, StepOutcome, ThreadStepExecutor
from workers.runner.mask_inbox import MaskInbox
from workers.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class NamedStep:
    """plan: with its drafts named and its lengths true. has_runs: whether it was planned with
    drafts, of which none may have been found. started_s: when naming began, which took draft_s
    where drafts were asked for."""

    plan: StepPlan
    has_runs: bool
    started_s: float
    draft_s: float


class NamingStepExecutor(ThreadStepExecutor):
    """Naming a step waits for the step before, as all on the one thread does."""

    def __init__(
        self,
        name: Callable[[StepPlan], NamedStep],
        run_named: Callable[[NamedStep], StepOutcome],
        masks: MaskInbox,
    ) -> None:
        super().__init__(lambda plan: run_named(name(plan)), masks)
        self._name = name
        self._run_named = run_named
        self._last: Future[NamedStep] | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        named = self._last = self._pool.submit(self._name, plan)
        return FutureStep(self._pool.submit(lambda: self._run_named(named.result())))

    def named(self, plan: StepPlan) -> StepPlan:
        if self._last is None or self._last.result().plan.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} is not the one that was launched last")
        return self._last.result().plan
