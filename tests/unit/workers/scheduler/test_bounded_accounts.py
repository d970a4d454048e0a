"""Accounts that see a token for a while: what is no number, and how little memory is enough."""

import pytest

from attention.memory.layout import CurrentChunk, LastTokens
from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import AccountPages
from workers.errors import ConfigError
from workers.scheduler.config import BoundedAccount

WINDOW = LastTokens(4)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("enable_prefix_cache", [False, True])
def test_a_prompt_of_no_numbers_ends_and_gives_its_pages_back(
    enable_prefix_cache: bool, is_overlapped: bool
):
    """What a window hides vouches for nothing, so that its first such chunk ends it (0084)."""
    config = make_config(
        bounded=(BoundedAccount(WINDOW, 7),),
        max_step_tokens=4,
        enable_prefix_cache=enable_prefix_cache,
    )
    driver = Driver(config, is_overlapped)
    driver._runner.has_nan_chunks = True
    request = make_request("r", [2 + i % 20 for i in range(50)])
    driver.submit(request)
    driver.finish()
    assert driver.tokens("r") == []
    assert driver.scheduler.stats().num_used_pages == 0
    driver._runner.has_nan_chunks = False
    after = make_request("after", [2 + i % 20 for i in range(50)])
    driver.submit(after)
    driver.finish()
    assert driver.tokens("after") == run_alone(config, after).token_ids
    assert sum(len(plan.bounded_cleared[0]) for plan in driver.plans) > 0


def test_the_account_that_is_used_most_is_what_is_told():
    config = make_config(num_pages=65, bounded=(BoundedAccount(LastTokens(16), 12),))
    driver = Driver(config)
    driver.submit(make_request("r", list(range(2, 26)), max_tokens=20))
    assert driver.scheduler.stats().num_pages == 64
    driver.launch()
    driver.commit()
    stats = driver.scheduler.stats()
    assert (stats.num_pages, stats.num_used_pages) == (11, 4)
    assert stats.accounts == (
        AccountPages("every_token", 64, 6, 0),
        AccountPages("window_16", 11, 4, 2),
    ), "what the window has left behind stays, for others, as long as nobody needs the pages"
    driver.finish()


def test_what_a_prompt_leaves_behind_its_window_is_free_as_soon_as_it_is_computed():
    """Not first at its next page: pages of 64 tokens would keep others out for as many steps."""
    bounded = (BoundedAccount(LastTokens(4), 33),)
    driver = Driver(make_config(num_pages=65, bounded=bounded, enable_prefix_cache=False), True)
    driver.submit(make_request("r", list(range(2, 26)), max_tokens=20))
    for _ in range(2):
        driver.launch()
    assert driver.scheduler.stats().accounts[1].num_used == 7, "24 tokens, and a first one"
    driver.commit()
    assert driver.scheduler.stats().accounts[1].num_used == 2
    driver.finish()


@pytest.mark.parametrize(
    ("num_pages", "bounded"),
    [
        (9, BoundedAccount(LastTokens(60), 9)),
        (65, BoundedAccount(LastTokens(60), 17)),
        (65, BoundedAccount(CurrentChunk(33), 17)),
    ],
)
def test_as_many_pages_as_account_0_or_as_the_context_needs_are_enough(num_pages, bounded):
    assert bounded.num_pages < bounded.min_pages(4)
    config = make_config(num_pages=num_pages, max_context_len=64, bounded=(bounded,))
    driver = Driver(config, is_overlapped=True)
    length = min(40, config.max_request_len - 10)
    requests = [make_request(f"r{i}", [2 + i, *range(2, 1 + length // 2)]) for i in range(6)]
    driver.submit(*requests)
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids
    with pytest.raises(ConfigError, match="too few for a request that sees"):
        make_config(
            num_pages=num_pages,
            max_context_len=64,
            bounded=(BoundedAccount(bounded.retention, bounded.num_pages - 1),),
        )
