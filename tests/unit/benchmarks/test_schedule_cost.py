"""The cost of a schedule: every policy computes the whole workload, and the cost model adds up."""

import pytest

from benchmarks.schedule_cost import (
    BYTES_PER_S,
    KV_BYTES,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    POLICIES,
    PREFILL_REST_S,
    PROMPT_TOKENS,
    REST_S,
    Step,
    run,
)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_policy_computes_every_token_once(policy):
    steps = run(*policy)
    assert sum(step.num_prefill_tokens for step in steps) == NUM_REQUESTS * PROMPT_TOKENS
    # The first output token comes from the prefill, the last is never computed on.
    assert sum(step.num_decode for step in steps) == NUM_REQUESTS * (OUTPUT_TOKENS - 1)
    assert max(step.num_decode for step in steps) <= policy[2]


def test_a_step_costs_its_gemms_its_keys_and_its_prompt_tokens():
    keys = 256 * 1000
    attention_s = keys * KV_BYTES / BYTES_PER_S
    assert Step(256, 0, keys).seconds == pytest.approx(6.74e-3 + attention_s + REST_S)
    assert Step(0, 8192, 0).seconds == pytest.approx(0.168 + 8192 * PREFILL_REST_S + REST_S)
    assert Step(32, 0, 0).seconds == pytest.approx(3.8e-3 + 31 / 63 * 0.32e-3 + REST_S)
