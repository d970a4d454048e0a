"""What it costs to admit many requests at once whose long beginnings are cached.

    python -m benchmarks.plan_cost [--requests 64 --tokens 120000] [--page-size 128]

The real scheduler computes one document, then as many requests as asked for come with a question
each about it. Printed is what their first plan takes: bytes of its frame, which every rank
receives, milliseconds to schedule it, and milliseconds to write what it says into req_to_token
on this machine's CPU. No model. Medians of --repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention.config import AttentionConfig, LayerAttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from benchmarks.pretended_steps import result_of
from workers.engine.protocol import GenerateRequest
from workers.runner.step_inputs import StepInputBuilder
from workers.sampling.params import SamplingParams
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import StepPlan, make_plan_decoder, make_plan_encoder
from workers.scheduler.scheduler import Scheduler

QUESTION_TOKENS = 16
VOCAB_SIZE = 32_000
MAX_STEP_TOKENS = 65_536
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Of one plan. num_admitted: requests that it admits."""

    num_admitted: int
    frame_bytes: int
    schedule_ms: float
    encode_ms: float
    write_ms: float


class Workload:
    """num_requests requests over one cached document of num_tokens tokens."""

    def __init__(self, num_requests: int, num_tokens: int, page_size: int) -> None:
        self._num_requests = num_requests
        self._document = np.random.default_rng(0).integers(1, VOCAB_SIZE, num_tokens).tolist()
        self._config = _config(num_requests, num_tokens, page_size)
        self._inputs = _step_inputs(self._config)

    def measure(self, sampling: SamplingParams) -> PlanCost:
        scheduler = Scheduler(self._config)
        scheduler.submit(GenerateRequest("document", self._document, _FIRST_TOKEN))
        while scheduler.has_work:
            plan = _required(scheduler.schedule())
            scheduler.commit(plan, result_of(plan))
        for index in range(self._num_requests):
            question = [1 + index] * QUESTION_TOKENS
            prompt = self._document + question
            scheduler.submit(GenerateRequest(f"{index}", prompt, sampling))
        started_s = time.perf_counter()
        plan = _required(scheduler.schedule())
        scheduled_s = time.perf_counter()
        frame = make_plan_encoder().encode(plan)
        encoded_s = time.perf_counter()
        received = make_plan_decoder().decode(frame)
        decoded_s = time.perf_counter()
        self._inputs.apply_memory_writes(received)
        written_s = time.perf_counter()
        return PlanCost(
            len(plan.admitted),
            len(frame),
            (scheduled_s - started_s) * 1e3,
            (encoded_s - scheduled_s) * 1e3,
            (written_s - decoded_s) * 1e3,
        )


_FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=64),
    "repetition penalty": SamplingParams(repetition_penalty=1.1, max_tokens=64),
}


def median_cost(costs: Sequence[PlanCost]) -> PlanCost:
    return PlanCost(
        costs[0].num_admitted,
        costs[0].frame_bytes,
        statistics.median(cost.schedule_ms for cost in costs),
        statistics.median(cost.encode_ms for cost in costs),
        statistics.median(cost.write_ms for cost in costs),
    )


def _required(plan: StepPlan | None) -> StepPlan:
    if plan is None:
        raise RuntimeError("there is work and no plan")
    return plan


def _config(num_requests: int, num_tokens: int, page_size: int) -> SchedulerConfig:
    own_tokens = 2 * num_requests * (QUESTION_TOKENS + 64 + 2 * page_size)
    return SchedulerConfig(
        page_size=page_size,
        num_pages=2 + (num_tokens + own_tokens) // page_size,
        max_running_requests=num_requests,
        max_context_len=num_tokens + 1024,
        max_step_tokens=MAX_STEP_TOKENS,
        target_inter_token_s=None,
        max_waiting_requests=num_requests + 1,
        max_waiting_tokens=1 << 40,
        enable_prefix_cache=True,
        enable_mixed_batches=True,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
        seed=0,
    )


def _step_inputs(config: SchedulerConfig) -> StepInputBuilder:
    geometry = AttentionConfig(
        num_layers=1,
        tp_q_head_num=1,
        tp_k_head_num=1,
        head_dim=8,
        v_head_dim=8,
        max_context_len=config.max_context_len,
        page_size=config.page_size,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=CPU,
        layers=(LayerAttentionConfig(),),
    )
    table = ReqToTokenPool(config.max_running_requests, config.max_context_len, CPU)
    return StepInputBuilder(table, MHATokenToKVPool(geometry, config.num_pages), CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=120_000, help="of the cached document")
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    columns = ("requests", "admitted", "frame bytes", "schedule ms", "encode ms")
    print(f"| {' | '.join(columns)} | table writes ms |")
    print("|---|---|---|---|---|---|")
    for page_size in arguments.page_size:
        workload = Workload(arguments.requests, arguments.tokens, page_size)
        for name, sampling in SAMPLINGS.items():
            cost = median_cost([workload.measure(sampling) for _ in range(arguments.repeats)])
            print(
                f"| {name}, page size {page_size} | {cost.num_admitted} | {cost.frame_bytes:,} | "
                f"{cost.schedule_ms:.1f} | {cost.encode_ms:.1f} | {cost.write_ms:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
