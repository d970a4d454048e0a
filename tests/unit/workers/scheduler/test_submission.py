"""What is refused at the door, with which code, and that nothing is kept of it."""

import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from workers.engine.protocol import FinishReason
from workers.errors import ConfigError, ErrorCode, RequestRejectedError


def rejection(driver: Driver, prompt: list[int], request_id: str = "r", **sampling: object):
    before = driver.scheduler.stats()
    with pytest.raises(RequestRejectedError) as caught:
        driver.scheduler.submit(make_request(request_id, prompt, **sampling))
    assert driver.scheduler.stats() == before
    return caught.value


def test_an_empty_prompt_is_invalid():
    error = rejection(Driver(make_config()), [])
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "prompt")


@pytest.mark.parametrize("token_id", [-1, 32, 2**31, 2**70, -(2**70)])
def test_a_token_outside_the_vocabulary_is_invalid(token_id: int):
    error = rejection(Driver(make_config()), [3, token_id])
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "prompt")
    assert str(token_id) in error.message


def test_sampling_parameters_are_checked_against_the_vocabulary():
    error = rejection(Driver(make_config()), [3], stop_token_ids=(32,))
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "stop_token_ids")


def test_an_id_in_use_is_refused_until_its_final_output_is_out():
    driver = Driver(make_config())
    driver.submit(make_request("r", [3]))
    assert rejection(driver, [4]).param == "request_id"
    driver.scheduler.abort("r")
    assert rejection(driver, [4]).param == "request_id"
    driver.step()
    driver.submit(make_request("r", [4]))
    driver.finish()
    assert driver.last("r").finish_reason is FinishReason.LENGTH


def test_a_prompt_without_room_for_one_token_exceeds_the_context():
    driver = Driver(make_config(max_context_len=8))
    error = rejection(driver, [3] * 8, max_tokens=None)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "8 prompt tokens" in error.message
    driver.submit(make_request("fits", [3] * 7, max_tokens=None))


def test_max_tokens_past_the_context_is_refused_with_the_numbers():
    driver = Driver(make_config(max_context_len=16))
    error = rejection(driver, [3] * 10, max_tokens=7)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens")
    assert all(number in error.message for number in ("10", "7", "17", "16"))
    driver.submit(make_request("fits", [3] * 10, max_tokens=6))


def test_min_tokens_that_cannot_be_reached_are_refused():
    error = rejection(Driver(make_config(max_context_len=16)), [3], max_tokens=None, min_tokens=16)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "min_tokens")


def test_what_can_never_fit_the_pool_is_refused_and_what_just_fits_runs():
    driver = Driver(make_config(num_pages=4, page_size=4))  # 12 tokens, plus the last one
    error = rejection(driver, [3] * 6, max_tokens=8)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "4 pages" in error.message
    assert error.message.endswith("this engine has 3")
    driver.submit(make_request("fits", [3] * 6, max_tokens=7))
    driver.finish()
    assert len(driver.tokens("fits")) == 7


def test_without_max_tokens_the_pool_is_the_limit_when_it_is_smaller_than_the_context():
    driver = Driver(make_config(num_pages=4, page_size=4))
    driver.submit(make_request("r", [3] * 6, max_tokens=None))
    driver.finish()
    assert len(driver.tokens("r")) == 7
    assert driver.last("r").finish_reason is FinishReason.LENGTH


def test_too_many_waiting_requests_are_refused():
    driver = Driver(make_config(max_waiting_requests=2))
    driver.submit(make_request("a", [3]), make_request("b", [3]))
    assert rejection(driver, [3], "c").code is ErrorCode.QUEUE_FULL
    driver.step()
    driver.submit(make_request("c", [3]))


def test_too_many_waiting_tokens_are_refused_but_an_empty_queue_takes_any_prompt():
    driver = Driver(make_config(max_waiting_tokens=8))
    driver.submit(make_request("a", [3] * 20))
    error = rejection(driver, [3], "b")
    assert error.code is ErrorCode.QUEUE_FULL
    assert "20" in error.message


def test_seeds_are_drawn_once_and_reproducibly():
    seeds = []
    for _ in range(2):
        driver = Driver(make_config(seed=5))
        driver.submit(*(make_request(name, [3], seed=None) for name in "ab"))
        driver.submit(make_request("c", [3], seed=9))
        driver.step()
        seeds.append([admitted.seed for admitted in driver.plans[0].admitted])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][2] == 9


def test_without_an_operators_seed_no_two_schedulers_draw_alike():
    """As replicas or restarts: the same requests in the same order."""
    seeds = []
    for _ in range(3):
        driver = Driver(make_config(seed=None))
        driver.submit(*(make_request(name, [3], seed=None) for name in "ab"))
        driver.step()
        seeds += [admitted.seed for admitted in driver.plans[0].admitted]
    assert len(set(seeds)) == 6


@pytest.mark.parametrize("change", [{"num_pages": 1}, {"page_size": 0}, {"num_pages": 2**30}])
def test_an_impossible_configuration_is_refused(change: dict[str, int]):
    with pytest.raises(ConfigError):
        make_config(**change)
