"""A prefix that is being computed is waited for, not computed again."""

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.scheduler.prefill_batch import MAX_PARKED_A_STEP
from workers.scheduler.prefills_under_way import MIN_SAVED_TOKENS, common_length

SHARED = [2 + i % 29 for i in range(MIN_SAVED_TOKENS + 8)]
BIG = {
    "max_context_len": 1024,
    "max_step_tokens": 1024,
    "num_pages": 513,
    "max_waiting_tokens": 1 << 16,
}


def config_with(**changes):
    return make_config(**{**BIG, **changes})


def num_computed(driver: Driver) -> int:
    return sum(int(plan.num_new_tokens.sum()) for plan in driver.plans)


def family(num_requests: int, **request):
    return [make_request(f"r{i}", [*SHARED, 3 + i, 7, 9], **request) for i in range(num_requests)]


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("max_step_tokens", [96, 1024])
def test_requests_that_come_together_compute_their_prefix_once(is_overlapped, max_step_tokens):
    driver = Driver(config_with(max_step_tokens=max_step_tokens), is_overlapped)
    requests = family(6, max_tokens=1)
    driver.submit(*requests)
    driver.finish()
    assert num_computed(driver) == len(SHARED) + 3 + 5 * 3
    cached = [driver.outputs[request.request_id][0].num_cached_tokens for request in requests]
    assert cached == [0, *[len(SHARED)] * 5]
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(driver.config, request).token_ids


def test_a_request_that_shares_nothing_does_not_wait_behind_those_that_do():
    driver = Driver(config_with())
    driver.submit(*family(2), make_request("other", [5, 4, 3]))
    plan = driver.launch()
    assert plan is not None
    assert plan.num_new_tokens.tolist() == [len(SHARED) + 3, 3]


@pytest.mark.parametrize("num_sharing", [65, MAX_PARKED_A_STEP - 1])
def test_however_many_share_a_prefix_nobody_else_waits_for_it(num_sharing):
    config = config_with(max_waiting_requests=1024, max_waiting_tokens=1 << 20)
    driver = Driver(config, is_overlapped=True)
    driver.submit(*family(1, max_tokens=1))
    driver.launch()
    sharing = [make_request(f"s{i}", [*SHARED, 4, 5 + i % 20]) for i in range(num_sharing)]
    driver.submit(*sharing, make_request("other", [5, 4, 3], max_tokens=1))
    plan = driver.launch()
    assert plan is not None, "the prefix is under way and nothing is known of it"
    assert plan.num_new_tokens.tolist() == [3]
    assert driver.scheduler.stats().num_waiting == num_sharing
    driver.commit()
    driver.finish()
    cached = {driver.outputs[request.request_id][0].num_cached_tokens for request in sharing}
    assert cached == {len(SHARED)}


def test_a_step_parks_so_many_at_most_and_the_next_one_goes_on():
    config = config_with(max_waiting_requests=1024, max_waiting_tokens=1 << 20)
    driver = Driver(config, is_overlapped=True)
    driver.submit(*family(1, max_tokens=1))
    driver.launch()
    num_sharing = MAX_PARKED_A_STEP + 3
    driver.submit(*(make_request(f"s{i}", [*SHARED, 4, 5]) for i in range(num_sharing)))
    driver.submit(make_request("other", [5, 4, 3], max_tokens=1))
    assert driver.launch() is None
    plan = driver.launch()
    assert plan is not None
    assert plan.num_new_tokens.tolist() == [3]
    driver.commit()
    driver.finish()


def test_a_parked_request_can_be_aborted_and_is_counted_while_it_waits():
    driver = Driver(config_with(max_step_tokens=64))
    driver.submit(*family(3))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_waiting, stats.num_running) == (2, 1)
    assert driver.scheduler.abort("r1")
    driver.scheduler.check_integrity()
    driver.finish()
    assert driver.is_aborted("r1")
    assert len(driver.tokens("r2")) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"salt": "tenant"},
        {"prompt_logprobs": 0},
        {"prompt": SHARED[: MIN_SAVED_TOKENS - 1]},
        {"prompt": [9, *SHARED]},
    ],
    ids=["another salt", "all logits wanted", "too short", "another beginning"],
)
def test_requests_that_would_save_nothing_do_not_wait(changes):
    driver = Driver(config_with())
    second = {"prompt": [*SHARED, 5], **changes}
    driver.submit(*family(1), make_request("second", **second))
    plan = driver.launch()
    assert plan is not None
    assert plan.batch_size == 2


def test_without_a_prefix_cache_nobody_waits():
    driver = Driver(config_with(enable_prefix_cache=False))
    driver.submit(*family(3))
    plan = driver.launch()
    assert plan is not None
    assert plan.batch_size == 3


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_those_that_waited_go_on_when_the_one_they_waited_for_is_aborted(is_overlapped):
    driver = Driver(config_with(max_step_tokens=64), is_overlapped)
    requests = family(3)
    driver.submit(*requests)
    driver.step()
    driver.scheduler.abort("r0")
    driver.finish()
    for request in requests[1:]:
        assert driver.tokens(request.request_id) == run_alone(driver.config, request).token_ids


def test_common_length():
    tokens = np.arange(6, dtype=np.int32)
    other = np.array([0, 1, 2, 9, 4], dtype=np.int32)
    assert common_length(tokens, other) == 3
    assert common_length(tokens, tokens[:4]) == 4
    assert common_length(tokens, tokens[1:]) == 0
    assert common_length(tokens[:0], tokens) == 0
