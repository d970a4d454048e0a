"""What a target for the time between tokens costs and brings: the real scheduler, simulated steps.

    python -m benchmarks.step_budget [--targets-ms 40 50 60] [--loads "128 streams" ...] [--repeat]
        [--mixed-share 0.55]

Replays loads of clients that keep a number of streams open, or that come at random, and prints
tokens/s, time to the first token and inter-token latency: for steps of 8,192 and 2,048 tokens, and
for targets, with prompts and decode rows by turns, and with longer steps while prompts outnumber
streams. How long a step truly takes is Cost's, of Llama-3.1-8B's shapes on one H200; the
scheduler has to learn it from the steps, noise and a slow first one included. No model and no
waiting: a seed gives the same figures on any machine. Left out: HTTP, but for REQUEST_DELAY_S.

--repeat: loads whose names are equally long share prompts, as they did when the served figures of
docs/performance.md were taken, so that the prefix cache knows those of the later one.
--mixed-share: how fast decode rows beside prompts read their keys, of the memory's speed; measured
are 0.85 to 0.9 (benchmarks.h200.mixed_steps).
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field

import numpy as np

from benchmarks.pretended_steps import result_of
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import StepPlan
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step_budget import InterTokenTarget, PromptAllowance
from workers.scheduler.step_cost import StepCostModel
from workers.scheduler.step_filling import TILE_TOKENS, EvenSteps
from workers.scheduler.step_work import StepWork

REQUEST_DELAY_S = 0.005
"""From the last token of a request to the next one's arrival at the engine."""
REQUEST_INTERVAL_S = 0.0005
"""Between arrivals of requests that clients send at once: what an ingress needs for one."""
NOISE = 0.015
"""Standard deviation of a step's duration, relative to it."""
COMPILATION_S = 0.7
VOCAB_SIZE = 128_000
MAX_STEP_TOKENS = 8192
PATIENT_PROMPT_TOKENS = 1024
MIXED_SHARE = 0.9
FULL_SHARE = 0.98
"""How far 8,192 tokens, which the documents' time a token is of, fill their waves."""
TIMED_TOKENS = range(128, 4097, 128)


@dataclass(frozen=True, slots=True)
class Load:
    """concurrency: streams at a time; None: they come at rate_per_s, at random."""

    prompt_tokens: int
    output_tokens: int
    num_requests: int
    concurrency: int | None
    rate_per_s: float = 0.0


LOADS = {
    "32 streams": Load(1024, 256, 128, 32),
    "128 streams": Load(1024, 256, 384, 128),
    "256 streams": Load(512, 256, 768, 256),
    "poisson 8/s": Load(1024, 256, 160, None, 8.0),
    "poisson 14/s": Load(1024, 256, 240, None, 14.0),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step on an H200 (docs/performance.md).

    A decode step: products by the number of rows, keys at the memory's speed, the rest. A step with
    prompts: 24.2 ms of 1,024 tokens, 176 ms of 8 x 1,024; between these products go by waves of
    tiles (waves_s), which is what benchmarks.h200.prompt_steps finds within some percent. Decode
    rows in it are tokens more, and read their keys at mixed_share of the speed.
    """

    gemm_rows: tuple[int, ...] = (1, 64, 128, 192, 256)
    gemm_s: tuple[float, ...] = (3.8e-3, 4.12e-3, 4.9e-3, 5.7e-3, 6.74e-3)
    rest_s: float = 0.6e-3
    key_s: float = 131_072 / 4.2e12
    mixed_share: float = MIXED_SHARE
    prompt_rest_s: float = 2.5e-3
    prompt_token_s: float = 20.7e-6
    prompt_key_s: float = 0.95e-9

    num_multiprocessors: int = 132
    tile_columns: int = 256
    product_columns: tuple[tuple[int, int], ...] = (
        (6144, 4096),
        (4096, 4096),
        (28_672, 4096),
        (4096, 14_336),
    )

    def waves_s(self, num_tokens: int) -> float:
        """Products of so many tokens: tiles by waves, as if a wave of all of them took as long."""
        tiles = -(-num_tokens // TILE_TOKENS)
        waves = per_token = 0.0
        for columns, depth in self.product_columns:
            num_tiles = tiles * -(-columns // self.tile_columns)
            waves += -(-num_tiles // self.num_multiprocessors) * depth
            per_token += columns / self.tile_columns / self.num_multiprocessors * depth
        return waves * TILE_TOKENS / per_token * self.prompt_token_s * FULL_SHARE

    def seconds(self, work: StepWork) -> float:
        rows, keys_s = work.num_decode_rows, work.num_decode_keys * self.key_s
        floor_s = float(np.interp(rows, self.gemm_rows, self.gemm_s))
        if work.num_prompt_tokens == 0:
            return floor_s + keys_s + self.rest_s
        tokens_s = self.waves_s(work.num_prompt_tokens + rows)
        attention_s = work.num_prompt_keys * self.prompt_key_s + keys_s / self.mixed_share
        return max(tokens_s, floor_s) + attention_s + self.prompt_rest_s


@dataclass(slots=True)
class Told:
    """What a client saw of one request, in seconds of the simulation."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one load. Milliseconds but for tokens_per_s and num_prompt_steps."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    num_prompt_steps: int

    @classmethod
    def of(cls, told: list[Told], num_prompt_steps: int) -> Outcome:
        ttft = [1e3 * (one.token_s[0] - one.sent_s) for one in told]
        gaps = [1e3 * np.diff(one.token_s) for one in told]
        seconds = max(one.token_s[-1] for one in told) - min(one.sent_s for one in told)
        return cls(
            sum(len(one.token_s) for one in told) / seconds,
            *np.percentile(ttft, (50, 99)).tolist(),
            float(np.median([each.mean() for each in gaps])),
            *np.percentile(np.concatenate(gaps), (50, 99, 100)).tolist(),
            num_prompt_steps,
        )


class SimulatedEngine:
    """An engine whose steps take what cost says. As the real one's loop, it schedules a step while
    the one before runs, and commits that one afterwards."""

    def __init__(self, config: SchedulerConfig, cost: Cost, seed: int = 0) -> None:
        self.scheduler = Scheduler(config, lambda: self._now_s)
        self._now_s = 0.0
        self._cost = cost
        self._noise = np.random.default_rng(seed)
        self._load = LOADS["32 streams"]
        self._arrivals: list[tuple[float, str]] = []
        self._unsent: Iterator[GenerateRequest] = iter(())
        self._requests: dict[str, GenerateRequest] = {}
        self._told: dict[str, Told] = {}
        self._num_prompt_steps = 0
        self._warm_up()

    def run(self, load: Load, seed: int) -> Outcome:
        """seed: of the prompts and the times of arrival."""
        self._load, self._told, self._num_prompt_steps = load, {}, 0
        rng = np.random.default_rng(seed)
        self._unsent = make_requests(load, rng)
        for delay_s in self._first_delays(rng):
            self._send_one(self._now_s + delay_s)
        in_flight: tuple[StepPlan, float] | None = None
        while self._arrivals or self.scheduler.has_work:
            if in_flight is None and not self.scheduler.has_work:
                self._now_s = max(self._now_s, self._arrivals[0][0])
            self._take_arrivals()
            plan = self.scheduler.schedule()
            if in_flight is not None:
                self._finish(*in_flight)
            in_flight = None if plan is None else (plan, self._duration(plan))
        return Outcome.of(list(self._told.values()), self._num_prompt_steps)

    def _warm_up(self) -> None:
        """One short request, the first step of which compiles kernels."""
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self.scheduler.submit(GenerateRequest("warm-up", [0], params))
        late_s = COMPILATION_S
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.commit(plan, result_of(plan))
            self.scheduler.observe_duration(plan, late_s + self._duration(plan))
            late_s = 0.0

    def _first_delays(self, rng: np.random.Generator) -> list[float]:
        load = self._load
        if load.concurrency is not None:
            return [index * REQUEST_INTERVAL_S for index in range(load.concurrency)]
        gaps = rng.exponential(1.0 / load.rate_per_s, load.num_requests)
        return [float(delay_s) for delay_s in np.cumsum(gaps)]

    def _send_one(self, time_s: float) -> None:
        request = next(self._unsent, None)
        if request is not None:
            self._requests[request.request_id] = request
            self._told[request.request_id] = Told(time_s)
            heapq.heappush(self._arrivals, (time_s, request.request_id))

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            _, request_id = heapq.heappop(self._arrivals)
            self.scheduler.submit(self._requests.pop(request_id))

    def _duration(self, plan: StepPlan) -> float:
        work = StepWork.of(plan)
        self._num_prompt_steps += work.num_prompt_tokens > 0
        return self._cost.seconds(work) * float(self._noise.normal(1.0, NOISE))

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        self._now_s += seconds
        outputs = self.scheduler.commit(plan, result_of(plan))
        self.scheduler.observe_duration(plan, seconds)
        for index, output in enumerate(outputs):
            self._told[output.request_id].token_s.append(self._now_s)
            if output.finish_reason is not None and self._load.concurrency is not None:
                self._send_one(self._now_s + REQUEST_DELAY_S + index * REQUEST_INTERVAL_S)


def make_requests(load: Load, rng: np.random.Generator) -> Iterator[GenerateRequest]:
    """Prompts as vLLM's random data set makes them: ascending ids from a random first one."""
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    first_ids = rng.integers(0, VOCAB_SIZE, load.num_requests)
    for index, first in enumerate(first_ids):
        prompt = (first + index + np.arange(load.prompt_tokens)) % VOCAB_SIZE
        yield GenerateRequest(str(index), prompt.tolist(), params)


class PatientStreams:
    """A StepTarget, as an alternative: up to four times the target while prompts outnumber streams,
    prompts of PATIENT_PROMPT_TOKENS."""

    def __init__(self, target_s: float, costs: StepCostModel) -> None:
        self._target_s = target_s
        self._costs = costs

    def allowance(
        self, num_decode_rows: int, num_decode_keys: int, num_prompt_tokens: int
    ) -> PromptAllowance:
        prompts = num_prompt_tokens / PATIENT_PROMPT_TOKENS
        factor = min(4.0, max(1.0, prompts / max(1, num_decode_rows)))
        target = InterTokenTarget(factor * self._target_s, self._costs, EvenSteps())
        return target.allowance(num_decode_rows, num_decode_keys, num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Policy:
    """is_mixed: prompts and decode rows share steps. is_patient: PatientStreams. is_filled: with
    the times of products known."""

    max_step_tokens: int
    target_ms: float | None
    is_filled: bool = False
    is_mixed: bool = True
    is_patient: bool = False

    def make_engine(self, cost: Cost) -> SimulatedEngine:
        product_s = tuple(map(cost.waves_s, TIMED_TOKENS)) if self.is_filled else ()
        config = make_config(self.max_step_tokens, self.target_ms, self.is_mixed, product_s)
        engine = SimulatedEngine(config, cost)
        if self.is_patient and config.target_inter_token_s is not None:
            scheduler = engine.scheduler
            patient = PatientStreams(config.target_inter_token_s, scheduler._prompt_step_costs)
            scheduler._policy._target = patient  # type: ignore[attr-defined]
        return engine


def policies(targets_ms: Iterable[float]) -> dict[str, Policy]:
    chosen = {
        "8192 tokens": Policy(MAX_STEP_TOKENS, None),
        "2048 tokens": Policy(2048, None),
    }
    for ms in targets_ms:
        chosen[f"{ms:g} ms"] = Policy(MAX_STEP_TOKENS, ms)
        chosen[f"{ms:g} ms, filled"] = Policy(MAX_STEP_TOKENS, ms, is_filled=True)
        chosen[f"{ms:g} ms, by turns"] = Policy(MAX_STEP_TOKENS, ms, is_mixed=False)
        chosen[f"{ms:g} ms, patient"] = Policy(MAX_STEP_TOKENS, ms, is_patient=True)
    return chosen


def make_config(
    max_step_tokens: int,
    target_ms: float | None,
    is_mixed: bool = True,
    product_s: tuple[float, ...] = (),
) -> SchedulerConfig:
    """As large a pool as an H200 holds beside the weights."""
    return SchedulerConfig(
        page_size=128,
        num_pages=6000,
        max_running_requests=256,
        max_context_len=8192,
        max_step_tokens=max_step_tokens,
        target_inter_token_s=None if target_ms is None else target_ms / 1e3,
        max_waiting_requests=1024,
        max_waiting_tokens=1 << 22,
        enable_prefix_cache=True,
        enable_mixed_batches=is_mixed,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        seed=0,
        product_s=product_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets-ms", nargs="*", type=float, default=[40.0, 50.0, 60.0])
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--mixed-share", type=float, default=MIXED_SHARE)
    arguments = parser.parse_args()
    cost = Cost(mixed_share=arguments.mixed_share)
    print(
        "| load | step | tokens/s | of 8192 | TTFT p50, ms | p99 | TPOT p50 | ITL p50 | p99 | max"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    for label, policy in policies(arguments.targets_ms).items():
        engine = policy.make_engine(cost)
        for index, name in enumerate(arguments.loads):
            outcome = engine.run(LOADS[name], len(name) if arguments.repeat else index)
            share = outcome.tokens_per_s / first.setdefault(name, outcome.tokens_per_s)
            tokens_per_s, *times = astuple(outcome)[:-1]
            cells = [f"{tokens_per_s:.0f}", f"{share:.3f}", *(f"{ms:.1f}" for ms in times)]
            print(f"| {name} | {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
