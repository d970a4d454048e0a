"""Limits of the scheduler: what they may be at least, and what follows from them."""

import pytest

from tests.unit.workers.scheduler.driver import make_config
from workers.errors import ConfigError

LEAST = {
    "page_size": 1,
    "num_pages": 2,
    "max_running_requests": 1,
    "max_context_len": 2,
    "max_step_tokens": 1,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "vocab_size": 1,
}


@pytest.mark.parametrize("name", LEAST)
def test_a_limit_may_be_as_small_as_anything_can_run_with(name):
    least = LEAST[name]
    assert getattr(make_config(**{name: least}), name) == least
    with pytest.raises(ConfigError, match=f"{name} must be at least {least}, got {least - 1}"):
        make_config(**{name: least - 1})


def test_cache_indices_are_int32():
    """Up to 2**31 - 1, which is prime."""
    assert make_config(page_size=1, num_pages=2**31 - 1).pool_tokens == 2**31 - 2
    with pytest.raises(ConfigError, match="int32"):
        make_config(page_size=1, num_pages=2**31)
    with pytest.raises(ConfigError, match="int32"):
        make_config(page_size=2, num_pages=2**30)


def test_a_target_is_above_nothing():
    assert make_config(target_inter_token_s=1e-9).target_inter_token_s == 1e-9
    for target_s in (0.0, -1.0):
        with pytest.raises(ConfigError, match="must be above 0"):
            make_config(target_inter_token_s=target_s)


def test_a_request_has_the_context_or_the_pool_and_the_token_that_never_enters_it():
    config = make_config(page_size=4, num_pages=5, max_context_len=64)
    assert (config.pool_tokens, config.max_request_len) == (16, 17)
    assert config.max_pages_per_request == 5
    roomy = make_config(page_size=4, num_pages=100, max_context_len=64)
    assert (roomy.max_request_len, roomy.max_pages_per_request) == (64, 16)
    uneven = make_config(page_size=4, num_pages=100, max_context_len=65)
    assert uneven.max_pages_per_request == 17


def test_every_decode_row_fits_into_a_step():
    assert make_config(max_running_requests=8, max_step_tokens=5).max_slots == 5
    assert make_config(max_running_requests=4, max_step_tokens=5).max_slots == 4
