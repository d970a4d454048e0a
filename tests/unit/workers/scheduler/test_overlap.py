"""Scheduling while one plan is not committed: what is known in advance, and what overshoots."""

import pytest

from tests.unit.workers.scheduler.driver import EOS, TIGHT, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import FinishReason
from workers.scheduler.plan import LAST_SAMPLED_TOKEN


def test_the_next_step_of_a_request_is_scheduled_before_its_token_is_known():
    driver = Driver(make_config(), is_overlapped=True)
    driver.submit(make_request("r", [3, 4, 5]))
    driver.launch()
    plan = driver.launch()
    assert plan is not None
    assert plan.input_ids.tolist() == [LAST_SAMPLED_TOKEN]
    assert plan.prefix_lens.tolist() == [3]
    assert driver.outputs["r"] == []


def test_at_most_one_plan_may_be_uncommitted():
    driver = Driver(make_config(), is_overlapped=True)
    driver.submit(make_request("r", [3]))
    driver.launch()
    driver.launch()
    with pytest.raises(RuntimeError, match="commit one first"):
        driver.launch()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_limit_on_length_is_known_in_advance_and_never_overshot(max_tokens: int):
    driver = Driver(make_config(), is_overlapped=True)
    driver.submit(make_request("r", [3] * 5, max_tokens=max_tokens))
    driver.finish()
    assert len(driver.plans) == max_tokens
    assert len(driver.tokens("r")) == max_tokens


def test_the_end_of_the_context_is_never_overshot():
    driver = Driver(make_config(max_context_len=16), is_overlapped=True)
    driver.submit(make_request("r", [3] * 12, max_tokens=None))
    driver.finish()
    assert len(driver.plans) == len(driver.tokens("r")) == 4


def test_while_only_the_last_token_is_under_way_a_commit_is_needed():
    driver = Driver(make_config(), is_overlapped=True)
    driver.submit(make_request("r", [3], max_tokens=1))
    driver.launch()
    assert driver.launch() is None
    assert driver.scheduler.has_work
    driver.commit()
    assert driver.launch() is None
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_step_past_a_stop_is_dropped_and_its_page_comes_back(page_size: int):
    config = make_config(page_size=page_size, vocab_size=8)
    requests = [
        make_request(f"r{seed}", [2, 3, 4], seed=seed, max_tokens=30, ignore_eos=False)
        for seed in range(20)
    ]
    driver = Driver(config, is_overlapped=True)
    driver.submit(*requests)
    driver.finish()
    num_stopped = 0
    for request in requests:
        expected = run_alone(config, request)
        assert driver.tokens(request.request_id) == expected.token_ids
        num_stopped += expected.finish_reason is FinishReason.STOP
    assert num_stopped > 5
    assert driver.scheduler.stats().num_used_pages == 0


def test_a_slot_given_to_another_request_does_not_get_the_overshoot_of_the_one_before():
    config = make_config(max_running_requests=1, vocab_size=4)
    driver = Driver(config, is_overlapped=True)
    requests = [
        make_request(f"r{seed}", [2, 3], seed=seed, max_tokens=20, ignore_eos=False)
        for seed in range(6)
    ]
    driver.submit(*requests)
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids
        assert driver.tokens(request.request_id).count(EOS) <= 1


def test_when_pages_are_short_a_commit_comes_before_a_retraction():
    driver = Driver(make_config(**TIGHT), is_overlapped=True, has_reserve=False)
    driver.submit(*(make_request(name, [i] * 6, max_tokens=20) for i, name in enumerate("ab", 3)))
    for _ in range(40):
        if driver.launch() is None:
            break
        if len(driver.plans) > 1:
            driver.commit()
    assert driver.has_launched
    assert driver.scheduler.stats().num_preemptions == 0
    driver.commit()
    assert driver.launch() is not None
    assert driver.scheduler.stats().num_preemptions == 1
    driver.finish()
