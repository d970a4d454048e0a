"""How long steps become that decode rows wait for, and that prompts get on all the same."""

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from workers.errors import ConfigError
from workers.scheduler.plan import StepPlan
from workers.scheduler.step_budget import (
    MIN_PROMPT_TOKENS,
    UNMEASURED_PROMPT_TOKENS,
    InterTokenTarget,
    TimedAllowance,
    TokenAllowance,
)
from workers.scheduler.step_cost import StepCostModel
from workers.scheduler.step_filling import EvenSteps
from workers.scheduler.step_work import StepWork

TOKEN_S, ROW_S, REST_S = 20e-6, 40e-6, 2e-3
TARGET_S = 0.03
PROMPT_TOKENS = 4000


def seconds_of(plan: StepPlan) -> float:
    work = StepWork.of(plan)
    return REST_S + TOKEN_S * work.num_prompt_tokens + ROW_S * work.num_decode_rows


def long_config(**changes):
    return make_config(
        page_size=16,
        num_pages=4000,
        max_context_len=8192,
        max_step_tokens=8192,
        max_waiting_tokens=1 << 20,
        enable_prefix_cache=False,
        **{"target_inter_token_s": TARGET_S, **changes},
    )


def step(driver: Driver) -> tuple[StepPlan, float]:
    """One step without overlap: its plan and seconds."""
    driver.step()
    plan = driver.plans[-1]
    return plan, seconds_of(plan)


def busy_driver(num_streams: int = 4, **changes) -> Driver:
    """num_streams requests decode, and steps have been measured."""
    driver = Driver(long_config(**changes), seconds_of=seconds_of)
    for index in range(num_streams):
        driver.submit(make_request(f"s{index}", [3] * 200, max_tokens=2000))
        step(driver)
    while driver.scheduler.stats().queued_tokens:
        step(driver)
    step(driver)
    return driver


def prompt(name: str, num_tokens: int = PROMPT_TOKENS):
    return make_request(name, [5] * num_tokens, max_tokens=4)


def is_waited_for(plan: StepPlan) -> bool:
    return StepWork.of(plan).num_decode_rows > 0 and not plan.is_decode


@pytest.mark.parametrize("enable_mixed_batches", [True, False])
def test_nobody_waits_longer_than_the_target_for_prompts(enable_mixed_batches):
    driver = busy_driver(enable_mixed_batches=enable_mixed_batches)
    driver.submit(*(prompt(f"p{index}") for index in range(3)))
    seconds = []
    while not all(driver.is_finished(f"p{index}") for index in range(3)):
        seconds.append(step(driver)[1])
    assert max(seconds) <= 1.05 * TARGET_S
    with_prompts = [s for s in seconds if s > 0.5 * TARGET_S]
    # Of 12,000 tokens no step may take more than 1,400: as few steps as that needs.
    assert 8 <= len(with_prompts) <= 11


def test_without_a_target_a_step_takes_all_it_may():
    driver = busy_driver(target_inter_token_s=None)
    driver.submit(prompt("p0"), prompt("p1"))
    plan, _ = step(driver)
    assert StepWork.of(plan).num_prompt_tokens == 2 * PROMPT_TOKENS


def test_while_nobody_decodes_a_step_takes_all_it_may():
    driver = Driver(long_config())
    driver.submit(prompt("p0"), prompt("p1"))
    plan, _ = step(driver)
    assert StepWork.of(plan).num_prompt_tokens == 2 * PROMPT_TOKENS


def test_before_any_step_is_measured_prompts_get_little_beside_decode_rows():
    driver = Driver(long_config(), is_overlapped=True)
    driver.submit(make_request("s", [3] * 200, max_tokens=50))
    driver.step()
    driver.submit(prompt("p"))
    driver.step()
    assert StepWork.of(driver.plans[-1]).num_prompt_tokens == UNMEASURED_PROMPT_TOKENS


def test_prompts_get_on_where_decode_rows_alone_take_longer_than_the_target():
    driver = busy_driver(target_inter_token_s=1e-4)
    driver.submit(prompt("p"))
    tokens = []
    while not driver.is_finished("p"):
        plan, _ = step(driver)
        if is_waited_for(plan):
            tokens.append(StepWork.of(plan).num_prompt_tokens)
    assert sum(tokens) == PROMPT_TOKENS
    assert min(tokens[:-1]) >= MIN_PROMPT_TOKENS


def test_what_takes_two_steps_is_spread_over_them_evenly():
    driver = busy_driver()
    driver.submit(prompt("p", 1600))
    first, _ = step(driver)
    second, _ = step(driver)
    tokens = [StepWork.of(plan).num_prompt_tokens for plan in (first, second)]
    assert sum(tokens) == 1600
    assert max(tokens) <= 900


def test_one_request_at_most_is_half_prefilled():
    driver = busy_driver()
    driver.submit(*(prompt(f"p{index}", 300 + 500 * index) for index in range(4)))
    while not all(driver.is_finished(f"p{index}") for index in range(4)):
        step(driver)
        assert len(driver.scheduler._table.prefilling) <= 1


def test_the_error_of_predictions_is_among_the_statistics():
    driver = busy_driver()
    assert driver.scheduler.stats().step_prediction_error_s > 0.0


@pytest.mark.parametrize("num_prefix_tokens", [0, 100, 5000, 300_000])
def test_a_timed_chunk_is_as_long_as_fits(num_prefix_tokens):
    def cost_s(n: int) -> float:
        return n * 20e-6 + n * (num_prefix_tokens + n / 2) * 1e-9

    allowance = TimedAllowance(0.05, 1 << 30, 20e-6, 1e-9, first_tokens=0)
    room = allowance.room_for(num_prefix_tokens)
    assert cost_s(room) <= 0.05 * (1 + 1e-9)
    assert cost_s(room + 1) > 0.05
    allowance.spend(num_prefix_tokens, room)
    assert allowance.room_for(num_prefix_tokens) <= 1


def test_the_first_chunk_has_room_however_dear_it_is():
    allowance = TimedAllowance(1e-3, 1 << 30, 1.0, 0.0, first_tokens=128)
    assert allowance.room_for(0) == 128
    allowance.spend(0, 128)
    assert allowance.room_for(0) == 0


def test_tokens_are_counted_down():
    allowance = TokenAllowance(10)
    allowance.spend(0, 4)
    assert allowance.room_for(1000) == 6


def test_more_decode_rows_leave_less_for_prompts():
    costs = StepCostModel()
    rng = np.random.default_rng(0)
    for _ in range(60):
        n, rows = int(rng.integers(100, 3000)), int(rng.integers(0, 256))
        work = StepWork(n, n * n / 2, rows, rows * 1000)
        costs.observe(work, REST_S + TOKEN_S * n + 57e-9 * work.num_decode_keys)
    target = InterTokenTarget(0.05, costs, EvenSteps())
    rooms = [target.allowance(rows, rows * 1000, 1 << 20).room_for(0) for rows in (1, 64, 256)]
    assert rooms == sorted(rooms, reverse=True)
    left_s = 0.05 - REST_S - 57e-9 * 256_000
    assert rooms[2] == pytest.approx(left_s / TOKEN_S, rel=0.1)


def test_a_target_of_nothing_is_a_configuration_error():
    with pytest.raises(ConfigError, match="target_inter_token_s"):
        make_config(target_inter_token_s=0.0)
