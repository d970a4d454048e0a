"""Replicas in simulated time: the real scheduler and radix cache, and a cost for every step.

A step takes what benchmarks.schedule_cost says it took for Llama-3.1-8B's shapes on one H200. No
model, no processes, no waiting: the same seed gives the same figures on any machine, decision times
excepted. Left out: the network, tokenisation, and that the engine plans a step while one runs.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.pretended_steps import result_with
from benchmarks.routing_policies import PAGE_SIZE, Policy
from benchmarks.routing_traffic import VOCAB_SIZE, Conversation
from benchmarks.schedule_cost import Step
from service.channel.messages import ReplicaLoad
from service.channel.settings import ChannelSettings
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import StepPlan
from workers.scheduler.scheduler import Scheduler

LOAD_INTERVAL_S = ChannelSettings().load_interval_s


@dataclass(slots=True)
class Served:
    """One request's fate. Times in simulated seconds, decision_s in real ones."""

    conversation: Conversation
    turn: int
    request: GenerateRequest
    arrival_s: float
    decision_s: float = 0.0
    replica_id: str = ""
    ttft_s: float = -1.0
    num_cached_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)


class Replica:
    """A scheduler that computes nothing. Runs one step at a time."""

    def __init__(self, replica_id: str, pool_tokens: int, clock: Callable[[], float]) -> None:
        self.replica_id = replica_id
        self.num_tokens_computed = 0
        self.busy_s = 0.0
        self.num_received = 0
        self._last_report_s = -LOAD_INTERVAL_S
        self._clock = clock
        self._scheduler = Scheduler(_config(pool_tokens), clock)
        self._plan: StepPlan | None = None
        self._rng = np.random.default_rng(int(replica_id))

    def submit(self, request: GenerateRequest) -> None:
        self.num_received += 1
        self._scheduler.submit(request)

    def start_step(self) -> float | None:
        """Seconds that the next step takes; None while one runs or nothing is to do."""
        if self._plan is not None:
            return None
        self._plan = self._scheduler.schedule()
        if self._plan is None:
            return None
        self.num_tokens_computed += self._plan.num_tokens
        seconds = Step.of(self._plan).seconds
        self.busy_s += seconds
        return seconds

    def end_step(self) -> list[StepOutput]:
        plan, self._plan = self._plan, None
        if plan is None:
            raise RuntimeError("no step runs")
        sampled = self._rng.integers(1, VOCAB_SIZE, size=int(plan.samples.sum()), dtype=np.int32)
        return self._scheduler.commit(plan, result_with(plan, sampled))

    def report(self) -> ReplicaLoad | None:
        """The load, if a report is due."""
        if self._clock() - self._last_report_s < LOAD_INTERVAL_S:
            return None
        self._last_report_s = self._clock()
        return ReplicaLoad(self._scheduler.stats(), self.num_received, False)


class Simulation:
    """Runs conversations over replicas until the last request has ended."""

    def __init__(
        self,
        make_policy: Callable[[list[str], int, Callable[[], float]], Policy],
        num_replicas: int,
        pool_tokens: int,
        seed: int,
    ) -> None:
        self._now_s = 0.0
        names = [str(number) for number in range(num_replicas)]
        self.replicas = {name: Replica(name, pool_tokens, self._clock) for name in names}
        self._policy = make_policy(names, seed, self._clock)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._live: dict[str, Served] = {}
        self._served: list[Served] = []

    def run(self, conversations: Iterator[Conversation]) -> list[Served]:
        """Every request, in order of arrival."""
        for conversation in conversations:
            self._ask(conversation, 0, [], conversation.arrival_s)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        return self._served

    def _clock(self) -> float:
        return self._now_s

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _ask(self, conversation: Conversation, turn: int, said: list[int], time_s: float) -> None:
        asked = conversation.turns[turn]
        params = SamplingParams(
            temperature=0.0, max_tokens=asked.num_output_tokens, ignore_eos=True
        )
        name = str(next(self._order))
        request = GenerateRequest(name, said + asked.new_token_ids, params)
        served = Served(conversation, turn, request, time_s)
        self._at(time_s, lambda: self._route(served))

    def _route(self, served: Served) -> None:
        started = time.perf_counter()
        served.replica_id = self._policy.choose(served.request)
        served.decision_s = time.perf_counter() - started
        self._served.append(served)
        self._live[served.request.request_id] = served
        replica = self.replicas[served.replica_id]
        replica.submit(served.request)
        self._start_step(replica)

    def _start_step(self, replica: Replica) -> None:
        seconds = replica.start_step()
        if seconds is not None:
            self._at(self._now_s + seconds, lambda: self._end_step(replica))

    def _end_step(self, replica: Replica) -> None:
        for output in replica.end_step():
            self._take(output)
        self._start_step(replica)
        self._report(replica)

    def _report(self, replica: Replica) -> None:
        load = replica.report()
        if load is not None:
            self._policy.on_load(replica.replica_id, load)

    def _take(self, output: StepOutput) -> None:
        served = self._live[output.request_id]
        if not served.output_token_ids:
            served.ttft_s = self._now_s - served.arrival_s
            served.num_cached_tokens = output.num_cached_tokens
            self._policy.on_first_output(served.replica_id, output.request_id)
        served.output_token_ids += output.token_ids
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._policy.on_end(served.replica_id, output.request_id)
            self._ask_next(served)

    def _ask_next(self, served: Served) -> None:
        turn, turns = served.turn + 1, served.conversation.turns
        if turn < len(turns):
            said = served.request.prompt_token_ids + served.output_token_ids
            self._ask(served.conversation, turn, said, self._now_s + turns[turn].think_s)


def _config(pool_tokens: int) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=pool_tokens // PAGE_SIZE + 1,
        max_running_requests=256,
        max_context_len=16384,
        max_step_tokens=8192,
        target_inter_token_s=None,
        max_waiting_requests=1 << 20,
        max_waiting_tokens=1 << 30,
        enable_prefix_cache=True,
        enable_mixed_batches=True,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        seed=0,
    )
