"""When pages run out: who goes back to the queue, and that its output is unchanged."""

import numpy as np
import pytest

from tests.fakes.logprobs import prompt_entries
from tests.unit.workers.scheduler.driver import TIGHT, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import GenerateRequest
from workers.errors import IntegrityError


def make_requests(num_requests: int, **sampling: object) -> list[GenerateRequest]:
    return [
        make_request(f"r{i}", [i + 3] * 6, **{"seed": i, "max_tokens": 20, **sampling})
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("enable_prefix_cache", [False, True])
@pytest.mark.parametrize("enable_mixed_batches", [False, True])
def test_a_retracted_request_continues_as_if_nothing_had_happened(
    is_overlapped: bool, enable_prefix_cache: bool, enable_mixed_batches: bool
):
    config = make_config(
        **TIGHT,
        enable_prefix_cache=enable_prefix_cache,
        enable_mixed_batches=enable_mixed_batches,
    )
    driver = Driver(config, is_overlapped, has_reserve=False)
    requests = make_requests(5)
    driver.submit(*requests)
    driver.finish()
    assert driver.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids
    assert driver.scheduler.stats().num_used_pages == 0


def test_a_retracted_request_comes_back_with_its_seed_and_what_its_penalties_count():
    driver = Driver(make_config(**TIGHT), has_reserve=False)
    driver.submit(*make_requests(3, seed=None, repetition_penalty=1.2))
    driver.finish()
    tenancies: dict[int, list[np.ndarray]] = {}
    for plan in driver.plans:
        for admitted in plan.admitted:
            assert admitted.num_prompt_tokens == 6
            assert len(admitted.prompt_ids) == 1
            tenancies.setdefault(admitted.seed, []).append(admitted.output_ids)
    assert len(tenancies) == 3
    again = [arrays for arrays in tenancies.values() if len(arrays) > 1]
    assert again
    for arrays in again:
        for earlier, later in zip(arrays, arrays[1:], strict=False):
            assert len(later) > len(earlier)
            assert later[: len(earlier)].tolist() == earlier.tolist()


def preempted_seeds(driver: Driver) -> list[int]:
    """The seed of every request that was admitted again, in order."""
    seen: set[int] = set()
    again = []
    for plan in driver.plans:
        for admitted in plan.admitted:
            if admitted.seed in seen:
                again.append(admitted.seed)
            seen.add(admitted.seed)
    return again


def test_a_retraction_raises_the_forecast():
    driver = Driver(make_config(**TIGHT), has_reserve=False)
    driver.submit(*make_requests(2))
    forecast = driver.scheduler._forecast
    ratios = [forecast.ratio]
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
        ratios.append(forecast.ratio)
    assert sorted(ratios[:-1], reverse=True) == ratios[:-1], "it falls while nobody is retracted"
    assert ratios[-1] > ratios[-2]


def test_the_lowest_priority_goes_first_however_early_it_came():
    driver = Driver(make_config(**TIGHT), has_reserve=False)
    driver.submit(make_request("normal", [4] * 6, priority=0, max_tokens=20, seed=4))
    driver.step()
    driver.submit(make_request("urgent", [3] * 6, priority=-1, max_tokens=20, seed=3))
    driver.finish()
    assert preempted_seeds(driver) == [4]
    assert len(driver.tokens("normal")) == len(driver.tokens("urgent")) == 20


def test_among_equals_the_first_come_is_never_retracted():
    driver = Driver(make_config(**TIGHT), has_reserve=False)
    driver.submit(*make_requests(6))
    driver.finish()
    assert preempted_seeds(driver)
    assert 0 not in preempted_seeds(driver)


def test_a_retracted_request_runs_before_those_that_never_did():
    driver = Driver(make_config(**TIGHT, max_running_requests=2), has_reserve=False)
    driver.submit(*make_requests(4))
    driver.finish()
    order = [admitted.seed for plan in driver.plans for admitted in plan.admitted]
    assert order.index(2) > max(i for i, seed in enumerate(order) if seed == 1) > order.index(1)


def test_its_full_pages_stay_in_the_cache_and_are_found_again():
    driver = Driver(make_config(page_size=1, num_pages=41), has_reserve=False)
    driver.submit(*make_requests(2, max_tokens=24))
    driver.step_until_preempted()
    assert driver.scheduler.stats().num_evictable_pages > 0
    driver.finish()
    resumed = next(plan for plan in driver.plans if plan.step_id and plan.admitted)
    assert resumed.table_writes, "what was not evicted need not be computed again"


def test_prompt_log_probabilities_survive_a_retraction_in_the_middle_of_the_prompt():
    config = make_config(page_size=1, num_pages=31, max_step_tokens=6, max_context_len=31)
    driver = Driver(config, has_reserve=False)
    first = make_request("first", [3] * 4, max_tokens=26)
    second = make_request("second", list(range(2, 28)), max_tokens=4, prompt_logprobs=1)
    driver.submit(first, second)
    driver.step_until_preempted()
    assert driver.outputs["second"] == []
    assert any(plan.prompt_logprobs for plan in driver.plans)
    driver.finish()
    expected = run_alone(config, second)
    assert prompt_entries(driver.outputs["second"][0]) == expected.prompt_logprobs
    assert driver.tokens("second") == expected.token_ids


def test_a_chunk_that_finds_fewer_pages_than_admission_saw_waits_for_more():
    """What runs may take the pages between two chunks."""
    config = make_config(page_size=1, num_pages=41, max_step_tokens=8)
    driver = Driver(config, has_reserve=False)
    requests = [make_request(f"r{i}", [i + 3] * 30, seed=i, max_tokens=8) for i in range(4)]
    driver.submit(*requests)
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids


def lose_free_pages(driver: Driver) -> None:
    pool = driver.scheduler._pool
    assert pool.allocate(pool.num_available_pages) is not None


def test_a_lost_page_is_found():
    driver = Driver(make_config(), has_reserve=False)
    driver.submit(make_request("r", [3]))
    driver.step()
    driver.scheduler._pool.allocate(1)
    with pytest.raises(IntegrityError, match=r"have \[0\] owners instead of one"):
        driver.scheduler.check_integrity()


def test_a_single_request_without_a_page_is_an_integrity_error():
    driver = Driver(make_config(page_size=4), has_reserve=False)
    driver.submit(make_request("r", [3] * 4))
    driver.step()
    lose_free_pages(driver)
    with pytest.raises(IntegrityError, match="1 requests run and yet no page"):
        driver.scheduler.schedule()


def test_a_queue_that_no_page_is_left_for_is_an_integrity_error():
    driver = Driver(make_config(), has_reserve=False)
    lose_free_pages(driver)
    driver.submit(make_request("r", [3]))
    with pytest.raises(IntegrityError, match="0 of 64 pages are available, yet nothing can run"):
        driver.scheduler.schedule()
