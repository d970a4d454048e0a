"""What a key adds to a step is told from noise, and figures of lengths follow it."""

import random

import pytest

from workers.speculation.key_seconds import KeySeconds
from workers.speculation.step_seconds import StepSeconds

KEY_S = 3e-8


def observe_streams(keys: KeySeconds, key_s: float, seed: int = 0) -> None:
    """Of 64 rows, that begin anew in the middle; a step's noise is a hundredth of it."""
    rng = random.Random(seed)
    for step in range(300):
        num_keys = 64 * (1024 + 2 * (step % 200))
        keys.observe(64, 2, num_keys, 5e-3 * rng.gauss(1.0, 0.01) + key_s * num_keys)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_key_takes_is_found(seed: int) -> None:
    keys = KeySeconds()
    observe_streams(keys, KEY_S, seed)
    assert keys.of_a_key() == pytest.approx(KEY_S, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_slope(seed: int) -> None:
    keys = KeySeconds()
    observe_streams(keys, 0.0, seed)
    assert keys.of_a_key() < KEY_S / 10


def test_noise_is_not_taken_for_a_slope_at_any_step() -> None:
    """Figures of all lengths would move by it, and stay so until it is found anew."""
    for seed in range(30):
        rng, keys = random.Random(seed), KeySeconds()
        for step in range(300):
            keys.observe(64, 2, 64 * (1024 + 2 * (step % 200)), 5e-3 * rng.gauss(1.0, 0.01))
            assert keys.of_a_key() == 0.0


def test_a_step_that_prepared_the_device_is_no_part_of_it() -> None:
    keys = KeySeconds()
    keys.observe(64, 2, 64 * 1000, 0.3)
    observe_streams(keys, KEY_S)
    keys.observe(64, 2, 64 * 9000, 0.3)
    assert keys.of_a_key() == pytest.approx(KEY_S, rel=0.1)


def test_other_numbers_of_rows_are_not_compared() -> None:
    """Rows take their time, too, which is not that of their keys."""
    keys = KeySeconds()
    for step in range(300):
        num_rows = 64 - step % 2
        keys.observe(num_rows, 0, num_rows * 1000, 1e-4 * num_rows)
    assert keys.of_a_key() == 0.0


def test_a_length_that_was_measured_with_more_keys_costs_less_with_fewer() -> None:
    seconds = StepSeconds([0, 1, 2])
    long, short = 64 * 1500, 64 * 1000
    for num_keys in range(64 * 1000, long, 64):
        seconds.add(64, 1, 6e-3 + KEY_S * num_keys, num_keys)
    for _ in range(5):
        seconds.add(64, 2, 8e-3 + KEY_S * long, long)
    for _ in range(30):
        seconds.add(64, 1, 6e-3 + KEY_S * short, short)
    predicted = seconds.predict(64, short)
    assert predicted is not None
    assert predicted[1:] == pytest.approx([6e-3 + KEY_S * short, 8e-3 + KEY_S * short], rel=0.01)


def test_what_is_at_most_so_long_makes_no_step_longer() -> None:
    seconds = StepSeconds([0, 1])
    for _ in range(5):
        seconds.add(4, 1, 1e-3)
    for _ in range(50):
        seconds.add(4, 1, 1.5e-3, is_at_most=True)
    predicted = seconds.predict(4)
    assert predicted is not None
    assert predicted[1] == pytest.approx(1e-3)


def test_keys_take_no_longer_than_the_step_that_reads_them() -> None:
    """A slope that luck has found: steps that came with more keys were longer, and these are not.
    Figures stay those of steps, however often they are moved to other numbers of keys."""
    seconds = StepSeconds([0, 1])
    for step in range(40):
        num_keys = 1000 + step
        seconds.add(1, 1, 4e-3 + 4e-5 * step, num_keys)
    for _ in range(200):
        seconds.add(1, 0, 4e-3, 1000)
    predicted = seconds.predict(1, 1000)
    assert predicted is not None
    assert predicted[0] == pytest.approx(4e-3, rel=0.1)
