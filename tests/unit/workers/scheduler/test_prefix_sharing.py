"""Pages shared through the prefix cache: found, locked, moved to, and never across salts."""

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone

PROMPT = list(range(2, 20))  # 18 tokens, 4 full pages of 4


def num_computed(driver: Driver, first_plan: int = 0) -> int:
    return sum(plan.num_tokens for plan in driver.plans[first_plan:])


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_second_request_computes_only_what_is_new(is_overlapped: bool):
    driver = Driver(make_config(), is_overlapped)
    first, second = make_request("a", PROMPT), make_request("b", [*PROMPT[:14], 30, 31])
    driver.submit(first)
    driver.finish()
    num_plans = len(driver.plans)
    driver.submit(second)
    driver.finish()
    assert driver.outputs["b"][0].num_cached_tokens == 12
    assert num_computed(driver, num_plans) == (16 - 12) + 7
    for request in (first, second):
        assert driver.tokens(request.request_id) == run_alone(driver.config, request).token_ids


def test_the_last_prompt_token_is_always_computed():
    driver = Driver(make_config())
    for name in "ab":
        driver.submit(make_request(name, PROMPT[:16], max_tokens=1))
        driver.finish()
    assert driver.outputs["b"][0].num_cached_tokens == 12
    assert driver.plans[-1].num_tokens == 4


def test_output_is_cached_too():
    driver = Driver(make_config())
    driver.submit(make_request("turn-1", PROMPT, max_tokens=8))
    driver.finish()
    driver.submit(make_request("turn-2", [*PROMPT, *driver.tokens("turn-1"), 5, 6]))
    driver.finish()
    assert driver.outputs["turn-2"][0].num_cached_tokens == 24


def test_other_salts_find_nothing():
    driver = Driver(make_config())
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        driver.submit(make_request(name, PROMPT, salt=salt))
        driver.finish()
    assert [driver.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 0, 16]


def test_a_disabled_cache_keeps_nothing():
    driver = Driver(make_config(enable_prefix_cache=False))
    for name in "ab":
        driver.submit(make_request(name, PROMPT))
        driver.finish()
    assert driver.outputs["b"][0].num_cached_tokens == 0
    stats = driver.scheduler.stats()
    assert (stats.num_evictable_pages, stats.num_used_pages) == (0, 0)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_equal_prompts_computed_at_once_end_up_on_the_same_pages(is_overlapped: bool):
    driver = Driver(make_config(), is_overlapped)
    requests = [make_request(f"r{i}", PROMPT, seed=i, max_tokens=12) for i in range(3)]
    driver.submit(*requests)
    driver.step()
    driver.step()
    driver.step()
    # 4 shared pages and one page or two of each request's own.
    assert 4 + 3 <= driver.scheduler.stats().num_used_pages <= 4 + 6
    moved = [write for plan in driver.plans[1:] for write in plan.table_writes]
    assert [(write.first_page, len(write.pages)) for write in moved] == [(0, 4), (0, 4)]
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(driver.config, request).token_ids


def test_a_request_moves_only_from_where_its_own_pages_begin():
    driver = Driver(make_config())
    driver.submit(make_request("seed", PROMPT[:9], max_tokens=1))
    driver.finish()
    num_plans = len(driver.plans)
    driver.submit(*(make_request(f"r{i}", PROMPT, seed=i) for i in range(2)))
    driver.finish()
    _, *later = driver.plans[num_plans:]
    moved = [write for plan in later for write in plan.table_writes]
    assert [(write.first_page, len(write.pages)) for write in moved] == [(2, 2)]


def test_pages_in_use_are_not_evicted_by_others():
    config = make_config(num_pages=13)
    driver = Driver(config)
    first = make_request("first", PROMPT, max_tokens=10)
    driver.submit(first)
    driver.step()
    others = [make_request(f"r{i}", [20 + i] * 14, seed=i, max_tokens=2) for i in range(6)]
    driver.submit(*others)
    driver.finish()
    for request in (first, *others):
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids


def test_old_prefixes_make_room_for_new_requests():
    driver = Driver(make_config(num_pages=9))
    for i in range(6):
        driver.submit(make_request(f"r{i}", [10 + i] * 20, max_tokens=4))
        driver.finish()
    stats = driver.scheduler.stats()
    assert stats.num_finished == 6
    assert stats.num_preemptions == 0
    assert 0 < stats.num_evictable_pages <= 8


def test_a_move_is_dropped_when_its_request_ends_before_the_next_plan():
    driver = Driver(make_config())
    requests = [make_request(f"r{i}", PROMPT, seed=i) for i in range(2)]
    driver.submit(*requests)
    driver.step()
    driver.scheduler.abort("r1")
    plan = driver.launch()
    assert plan is not None
    assert plan.table_writes == ()
    driver.commit()
    driver.finish()
    assert driver.tokens("r0") == run_alone(driver.config, requests[0]).token_ids


def test_a_request_returns_to_its_prefix_once_however_long_it_waits():
    """It looks for its prefix at every step while it waits."""
    driver = Driver(make_config(num_pages=13))
    driver.submit(make_request("seed", PROMPT[:9], max_tokens=1))
    driver.finish()
    driver.submit(make_request("long", [30] * 20, max_tokens=20))
    driver.step()
    driver.submit(make_request("waiting", [*PROMPT, 25, 26], max_tokens=20))
    for _ in range(10):
        driver.step()
        assert driver.scheduler.stats().num_waiting == 1
    root = driver.scheduler._cache.match_prefix(
        np.array(PROMPT[:9], dtype=np.int32), ""
    ).node.parent
    assert root.num_returns == 0
    driver.finish()
    assert root.num_returns == 1


def test_a_retracted_request_does_not_count_as_a_return_to_what_it_left():
    driver = Driver(make_config(page_size=1, num_pages=41), has_reserve=False)
    driver.submit(*(make_request(f"r{i}", [i + 3] * 6, seed=i, max_tokens=24) for i in range(2)))
    driver.finish()
    assert driver.scheduler.stats().num_preemptions > 0
    roots = driver.scheduler._cache._roots.values()
    assert [root.num_returns for root in roots] == [0]
