"""How many prompt tokens a step takes where it is known which numbers fill the device."""

import pytest

from tests.unit.workers.scheduler.test_step_budget import busy_driver, prompt, step
from workers.scheduler.step_filling import TILE_TOKENS, EvenSteps, FilledSteps
from workers.scheduler.step_work import StepWork

WAVE_TILES = 8
"""Of a device that takes as long for one tile of a wave as for all of it."""
WAVES_S = tuple(1e-3 * -(-tiles // WAVE_TILES) for tiles in range(1, 33))
FULL = WAVE_TILES * TILE_TOKENS


@pytest.mark.parametrize("num_decode_rows", [1, 100, 127])
def test_a_step_ends_with_a_full_wave(num_decode_rows):
    filling = FilledSteps(WAVES_S)
    assert (
        filling.num_tokens(1 << 20, 2 * FULL + 100, num_decode_rows) == 2 * FULL - num_decode_rows
    )
    assert filling.num_tokens(FULL + 128, 2 * FULL, num_decode_rows) == FULL - num_decode_rows


def test_what_would_be_left_of_a_prompt_has_to_be_worth_a_step():
    # A prompt of a wave, which the decode rows push into another one.
    assert FilledSteps(WAVES_S).num_tokens(FULL, 2 * FULL, 127) == FULL


def test_what_fills_its_last_wave_nearly_goes_at_once():
    assert FilledSteps(WAVES_S).num_tokens(2 * FULL - 60, 4 * FULL, 50) == 2 * FULL - 60


def test_a_prompt_far_below_a_wave_is_not_cut():
    assert FilledSteps(WAVES_S).num_tokens(300, 4 * FULL, 50) == 300


def test_at_least_half_of_what_may_go_goes():
    # Two tiles are cheap, all others dear: yet not so few.
    product_s = (1e-3, 1e-3, *(1.0 * tiles for tiles in range(3, 17)))
    assert FilledSteps(product_s).num_tokens(2000, 2000, 10) >= 1000


@pytest.mark.parametrize("waiting", [1, 2, 127, 128, 129, 5000, 40_000])
@pytest.mark.parametrize("most", [1, 128, 700, 9000, 1 << 30])
@pytest.mark.parametrize("rows", [1, 128, 256, 1000])
def test_something_and_never_too_much(waiting, most, rows):
    for filling in (FilledSteps(WAVES_S), FilledSteps((1e-3, 2e-3)), EvenSteps()):
        assert 1 <= filling.num_tokens(waiting, most, rows) <= most


def test_products_that_take_as_long_as_they_have_tokens_leave_steps_as_they_are():
    filling = FilledSteps(tuple(1e-3 * tiles for tiles in range(1, 33)))
    assert filling.num_tokens(5000, 3000, 128) in (2944, 3000)


def test_the_scheduler_fills_waves():
    driver = busy_driver(product_s=WAVES_S)
    driver.submit(*(prompt(f"p{index}") for index in range(3)))
    plans = []
    while not all(driver.is_finished(f"p{index}") for index in range(3)):
        plans.append(step(driver)[0])
    works = [work for work in map(StepWork.of, plans) if work.num_prompt_tokens]
    totals = [work.num_prompt_tokens + work.num_decode_rows for work in works]
    assert sum(work.num_prompt_tokens for work in works) == 12_000
    # All but the last, which takes what is left.
    assert set(totals[:-1]) == {FULL}
