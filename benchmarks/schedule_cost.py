"""What a schedule costs: the real scheduler, no model, and a cost for every step.

    python -m benchmarks.schedule_cost [--steps]

Runs the workload of 512 requests of 1,024 prompt and 256 output tokens under several policies and
prints the predicted total. A step's cost comes from what steps of Llama-3.1-8B's shapes took on one
H200 (docs/performance.md), so that policies can be compared before one is built. --steps lists the
shipped policy's steps too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.pretended_steps import result_of
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams
from workers.scheduler.batch_policy import BatchPolicy
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.decode_batch import DecodeBatcher
from workers.scheduler.plan import StepPlan
from workers.scheduler.plan_draft import PlanDraft
from workers.scheduler.prefill_batch import PrefillBatcher
from workers.scheduler.scheduler import Scheduler

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 512, 1024, 256
SMALL_STEP_TOKENS = 4096

# Milliseconds of all GEMMs by tokens of a step; linear in between.
GEMM_TOKENS = (1, 64, 256, 8192, 16384)
GEMM_MS = (3.8, 4.12, 6.74, 168.0, 336.0)
REST_S = 0.42e-3
"""Norms, rotation, sampling and what lies between two steps."""
PREFILL_REST_S = 1.7e-6
"""Attention, norms and activation of a prompt token."""
KV_BYTES, BYTES_PER_S = 131_072, 4.2e12

Wrap = Callable[[DecodeBatcher, PrefillBatcher], BatchPolicy]


@dataclass(frozen=True, slots=True)
class Step:
    """decode_keys: keys of all decode rows together."""

    num_decode: int
    num_prefill_tokens: int
    decode_keys: int

    @classmethod
    def of(cls, plan: StepPlan) -> Step:
        is_decode = (plan.num_new_tokens == 1) & (plan.prefix_lens > 0)
        num_decode = int(is_decode.sum())
        keys = int((plan.prefix_lens[is_decode] + 1).sum())
        return cls(num_decode, plan.num_tokens - num_decode, keys)

    @property
    def seconds(self) -> float:
        num_tokens = self.num_decode + self.num_prefill_tokens
        gemms_s = float(np.interp(num_tokens, GEMM_TOKENS, GEMM_MS)) * 1e-3
        attention_s = self.decode_keys * KV_BYTES / BYTES_PER_S
        return gemms_s + attention_s + self.num_prefill_tokens * PREFILL_REST_S + REST_S


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prompts alone while one can run, decode otherwise."""

    decode: DecodeBatcher
    prefill: PrefillBatcher

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        self.prefill.add_rows(draft)
        if draft.is_empty:
            self.decode.add_rows(draft, can_retract)


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Decode rows first; prompts get what budget_of leaves of (tokens left, decode rows)."""

    decode: DecodeBatcher
    prefill: PrefillBatcher
    budget_of: Callable[[int, int], int]

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        before = draft.budget
        if self.decode.add_rows(draft, can_retract):
            draft.budget = self.budget_of(draft.budget, before - draft.budget)
            self.prefill.add_rows(draft)


def budgeted(budget_of: Callable[[int, int], int]) -> Wrap:
    return lambda decode, prefill: Budgeted(decode, prefill, budget_of)


def run(is_mixed: bool, wrap: Wrap | None, max_running: int) -> list[Step]:
    """The workload's steps, one plan in flight as in the engine."""
    scheduler = Scheduler(_config(is_mixed, max_running))
    if wrap is not None:
        shipped = scheduler._policy
        scheduler._policy = wrap(shipped._decode, shipped._prefill)  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        scheduler.submit(GenerateRequest(f"{index}", [5] * PROMPT_TOKENS, params))
    steps, launched = [], None
    while scheduler.has_work:
        plan = scheduler.schedule()
        if launched is not None:
            scheduler.commit(launched, result_of(launched))
        if plan is not None:
            steps.append(Step.of(plan))
        launched = plan
    return steps


def _config(is_mixed: bool, max_running: int) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=128,
        num_pages=6000,
        max_running_requests=max_running,
        max_context_len=8192,
        max_step_tokens=8192,
        target_inter_token_s=None,
        max_waiting_requests=NUM_REQUESTS,
        max_waiting_tokens=1 << 22,
        enable_prefix_cache=False,
        enable_mixed_batches=is_mixed,
        eos_token_ids=(),
        vocab_size=1000,
        seed=0,
    )


POLICIES: dict[str, tuple[bool, Wrap | None, int]] = {
    "mixed, as shipped": (True, None, 256),
    "alternating, as shipped": (False, None, 256),
    "prompts first": (True, PrefillFirst, 256),
    "decode rows beside the budget": (True, budgeted(lambda left, rows: left + rows), 256),
    "whole prompts only": (True, budgeted(lambda left, rows: left // 1024 * 1024), 256),
    "chunks of 4096": (True, budgeted(lambda left, rows: min(left, 4096)), 256),
    "chunks of 2048": (True, budgeted(lambda left, rows: min(left, 2048)), 256),
    "mixed, 512 running": (True, None, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", action="store_true")
    arguments = parser.parse_args()
    print("| policy | predicted s | steps | with prompts | of these under 4096 tokens |")
    print("|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        steps = run(*policy)
        with_prompts = [step for step in steps if step.num_prefill_tokens]
        num_small = sum(step.num_prefill_tokens < SMALL_STEP_TOKENS for step in with_prompts)
        total_s = sum(step.seconds for step in steps)
        print(f"| {name} | {total_s:.2f} | {len(steps)} | {len(with_prompts)} | {num_small} |")
    if arguments.steps:
        for index, step in enumerate(run(*POLICIES["mixed, as shipped"])):
            print(index, step.num_decode, step.num_prefill_tokens, f"{step.seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
