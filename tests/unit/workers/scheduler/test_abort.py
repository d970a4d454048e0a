"""abort() at every state: pages are back at once, and there is exactly one last output."""

import pytest

from tests.unit.workers.scheduler.driver import TIGHT, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import FinishReason, StepOutput

ABORTED = StepOutput("r", [], FinishReason.ABORT)


def make_driver(**changes: object) -> Driver:
    return Driver(make_config(**changes), is_overlapped=True)


def assert_gone(driver: Driver) -> None:
    driver.scheduler.check_integrity()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert stats.queued_tokens == stats.running_tokens == 0


def test_unknown_and_ended_requests_cannot_be_aborted():
    driver = make_driver()
    assert not driver.scheduler.abort("r")
    driver.submit(make_request("r", [3]))
    driver.finish()
    assert not driver.scheduler.abort("r")
    assert driver.scheduler.take_outputs() == []


def test_a_waiting_request_ends_without_a_step():
    driver = make_driver()
    driver.submit(make_request("r", [3]))
    assert driver.scheduler.abort("r")
    assert_gone(driver)
    assert driver.scheduler.has_work, "its last output is still to be handed out"
    assert driver.scheduler.take_outputs() == [ABORTED]
    assert driver.scheduler.take_outputs() == []
    assert not driver.scheduler.has_work
    assert driver.launch() is None


@pytest.mark.parametrize("num_launched", [1, 2])
def test_a_half_prefilled_request_in_uncommitted_plans_gives_its_pages_back(num_launched: int):
    driver = make_driver(max_step_tokens=8)
    driver.submit(make_request("r", [3] * 30))
    for _ in range(num_launched):
        driver.launch()
    assert driver.scheduler.abort("r")
    assert_gone(driver)
    outputs = [output for _ in range(num_launched) for output in driver.commit()]
    assert outputs == [ABORTED]
    assert not driver.scheduler.has_work


def test_a_decoding_request_gets_no_token_after_its_abort():
    driver = make_driver()
    driver.submit(make_request("r", [3] * 6))
    driver.launch()
    driver.launch()
    assert len(driver.commit()) == 1
    assert driver.scheduler.abort("r")
    assert_gone(driver)
    assert driver.commit() == [ABORTED]


@pytest.mark.parametrize("prompt_len", [6, 7, 8])
@pytest.mark.parametrize("num_committed", [0, 1])
def test_only_tokens_that_a_committed_step_vouches_for_are_cached(
    prompt_len: int, num_committed: int
):
    driver = make_driver(page_size=4)
    driver.submit(make_request("r", list(range(2, 2 + prompt_len))))
    driver.launch()
    driver.launch()
    for _ in range(num_committed):
        driver.commit()
    driver.scheduler.abort("r")
    num_cached_pages = prompt_len // 4 if num_committed else 0
    assert driver.scheduler.stats().num_evictable_pages == num_cached_pages
    assert_gone(driver)


def test_an_abort_between_a_step_and_the_end_of_its_prefill_shares_nothing_wrong():
    driver = make_driver(page_size=4)
    driver.submit(make_request("r", list(range(2, 14))))
    driver.launch()
    driver.scheduler.abort("r")
    driver.commit()
    again = make_request("again", list(range(2, 14)))
    driver.submit(again)
    driver.finish()
    assert driver.tokens("again") == run_alone(driver.config, again).token_ids


def test_rows_of_an_aborted_request_do_not_reach_the_next_owner_of_its_slot():
    driver = make_driver(max_running_requests=1)
    driver.submit(make_request("r", [3] * 6, max_tokens=20))
    driver.launch()
    driver.launch()
    driver.commit()
    driver.scheduler.abort("r")
    other = make_request("other", [9, 8, 7], seed=5)
    driver.submit(other)
    driver.launch()
    assert driver.plans[-1].admitted[0].slot == driver.plans[0].slots[0]
    driver.commit()
    driver.finish()
    assert driver.tokens("other") == run_alone(driver.config, other).token_ids


def test_others_are_not_disturbed_by_an_abort_in_a_small_pool():
    config = make_config(page_size=1, num_pages=41, max_step_tokens=16)
    driver = Driver(config, is_overlapped=True)
    requests = [make_request(f"r{i}", [i + 2] * 10, seed=i, max_tokens=20) for i in range(6)]
    driver.submit(*requests)
    for i in range(0, 6, 2):
        driver.step()
        driver.step()
        driver.step()
        driver.scheduler.abort(f"r{i}")
    driver.finish()
    for i in range(1, 6, 2):
        assert driver.tokens(f"r{i}") == run_alone(config, requests[i]).token_ids
    assert all(driver.is_aborted(f"r{i}") for i in range(0, 6, 2))
    assert driver.scheduler.stats().num_finished == 6
    assert_gone(driver)


def test_a_retracted_request_can_be_aborted_while_it_waits_again():
    driver = Driver(make_config(**TIGHT), has_reserve=False)
    for i, name in enumerate(["first", "r"], 3):
        driver.submit(make_request(name, [i] * 6, max_tokens=20))
    driver.step_until_preempted()
    assert driver.scheduler.stats().num_waiting == 1
    assert driver.scheduler.abort("r")
    driver.finish()
    assert driver.is_aborted("r")
    assert len(driver.tokens("first")) == 20
    assert_gone(driver)
