"""Drives a scheduler and the history runner step by step, with or without overlap, and keeps what
every request was told. Plans reach the runner by the wire.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.unit.workers.scheduler.history_runner import HistoryRunner
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.kv_cache.snapshot_cache import SnapshotRadixCache
from workers.sampling.params import SamplingParams
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import StepPlan, StepResult, make_plan_decoder, make_plan_encoder
from workers.scheduler.scheduler import Scheduler

EOS = 1
# Room for two requests of 6 + 20 tokens to start, not for both to end.
TIGHT: dict[str, Any] = {"page_size": 4, "num_pages": 9, "max_context_len": 33}
_DEFAULTS: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 65,
    "max_running_requests": 8,
    "max_context_len": 64,
    "max_step_tokens": 64,
    "target_inter_token_s": None,
    "max_waiting_requests": 64,
    "max_waiting_tokens": 4096,
    "enable_prefix_cache": True,
    "enable_mixed_batches": True,
    "eos_token_ids": (EOS,),
    "vocab_size": 32,
    "seed": 0,
}


def make_config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{**_DEFAULTS, **changes})


def make_request(
    request_id: str, prompt: list[int], priority: int = 0, salt: str = "", **sampling: Any
) -> GenerateRequest:
    """Seeded and without end of sequence unless told otherwise."""
    params = {"seed": 11, "ignore_eos": True, "max_tokens": 8, **sampling}
    return GenerateRequest(request_id, prompt, SamplingParams(**params), priority, salt)


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Driver:
    """outputs: what each request id was told, in order. plans: every plan, in order.

    Without a reserve, admission leaves no room for output, which forces retractions.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        is_overlapped: bool = False,
        has_reserve: bool = True,
        seconds_of: Callable[[StepPlan], float] = lambda plan: 1e-3 * (2 + plan.num_tokens),
    ) -> None:
        """seconds_of: how long a step is said to have taken."""
        self.config = config
        self._seconds_of = seconds_of
        self.clock = Clock()
        self.scheduler = Scheduler(config, self.clock)
        if not has_reserve:
            self.scheduler._forecast.new_tokens = np.zeros_like
        self.outputs: dict[str, list[StepOutput]] = {}
        self.plans: list[StepPlan] = []
        self._runner = HistoryRunner(config)
        self._encoder, self._decoder = make_plan_encoder(), make_plan_decoder()
        self._depth = 2 if is_overlapped else 1
        self._launched: deque[tuple[StepPlan, StepResult]] = deque()

    @property
    def has_launched(self) -> bool:
        return bool(self._launched)

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.scheduler.submit(request)
            self.outputs[request.request_id] = []

    def fail_row(self, row: int) -> None:
        """In the next step the device has no memory for this row, if there is one."""
        self._runner.failing_row = row

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self._spoil_free_snapshots()
            received = self._decoder.decode(self._encoder.encode(plan))
            self._launched.append((plan, self._runner.run(received)))
        return plan

    def _spoil_free_snapshots(self) -> None:
        """The plan must not need them, nor any later one."""
        if isinstance(self.scheduler._cache, SnapshotRadixCache):
            self._runner.states.spoil(self.scheduler._cache._stock._free)

    def commit(self) -> list[StepOutput]:
        plan, result = self._launched.popleft()
        outputs = self.scheduler.commit(plan, result)
        self.scheduler.observe_duration(plan, self._seconds_of(plan))
        self._keep(outputs)
        self.scheduler.check_integrity()
        return outputs

    def step(self) -> None:
        """What an engine does: launch the next step, then commit the one before."""
        plan = self.launch()
        if plan is None:
            assert self._launched or not self.scheduler.stats().num_running
        if self._launched and (plan is None or len(self._launched) == self._depth):
            self.commit()
        else:
            self._keep(self.scheduler.take_outputs())

    def step_until_preempted(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if self.scheduler.stats().num_preemptions:
                return
            self.step()
        raise AssertionError(f"no retraction in {max_steps} steps: {self.scheduler.stats()}")

    def steps(self, max_steps: int = 5000) -> Iterator[None]:
        """Steps until nothing is left to do, one at a time."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
            yield
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.stats()}")

    def finish(self) -> None:
        for _ in self.steps():
            pass

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last(self, request_id: str) -> StepOutput:
        return self.outputs[request_id][-1]

    def is_finished(self, request_id: str) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def is_aborted(self, request_id: str) -> bool:
        return self.is_finished(request_id) and (
            self.last(request_id).finish_reason is FinishReason.ABORT
        )

    def is_failed(self, request_id: str) -> bool:
        return self.is_finished(request_id) and (
            self.last(request_id).finish_reason is FinishReason.ERROR
        )

    def _keep(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            assert not self.is_finished(output.request_id), "an output after the final one"
            self.outputs[output.request_id].append(output)
