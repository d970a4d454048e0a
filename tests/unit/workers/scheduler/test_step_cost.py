"""What the model of step durations learns, and what it does not let itself be told."""

import numpy as np
import pytest

from workers.scheduler.plan import StepPlan
from workers.scheduler.step_cost import StepCostModel
from workers.scheduler.step_work import StepWork

NOISE = 0.02


def h200_s(work: StepWork) -> float:
    """Of a model of 8 billion parameters."""
    tokens_s = 2.5e-3 + 20.7e-6 * (work.num_prompt_tokens + work.num_decode_rows)
    return tokens_s + 0.95e-9 * work.num_prompt_keys + 57e-9 * work.num_decode_keys


def slow_s(work: StepWork) -> float:
    """Of a machine whose parts relate otherwise: a large constant, dear keys."""
    tokens_s = 60e-3 + 0.4e-3 * work.num_prompt_tokens + 2e-3 * work.num_decode_rows
    return tokens_s + 50e-9 * work.num_prompt_keys + 2e-6 * work.num_decode_keys


def works(seed: int, num_steps: int) -> list[StepWork]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(64, 4096, num_steps)
    rows = rng.integers(0, 256, num_steps)
    starts = rng.integers(0, 4096, num_steps)
    return [
        StepWork(int(n), float(n * (start + n / 2)), int(r), int(r * rng.integers(100, 2000)))
        for n, r, start in zip(tokens, rows, starts, strict=True)
    ]


def teach(model: StepCostModel, truth, seed: int, num_steps: int) -> None:
    rng = np.random.default_rng(seed)
    for work in works(seed, num_steps):
        model.observe(work, truth(work) * float(rng.normal(1.0, NOISE)))


def worst_error(model: StepCostModel, truth) -> float:
    return max(abs(model.predict(work) / truth(work) - 1.0) for work in works(99, 200))


@pytest.mark.parametrize("truth", [h200_s, slow_s])
def test_it_learns_what_steps_cost_from_some_dozens(truth):
    model = StepCostModel()
    assert not model.is_fitted
    teach(model, truth, 1, 60)
    assert model.is_fitted
    assert worst_error(model, truth) < 0.12
    assert 0.0 < model.error_s < 0.1 * np.mean([truth(work) for work in works(1, 60)])


def test_one_measured_step_gives_the_scale_of_others():
    model = StepCostModel()
    prompts = StepWork(8192, 8 * 1024 * 512.0, 0, 0)
    model.observe(prompts, h200_s(prompts))
    work = StepWork(1900, 1900 * 512.0, 8, 8 * 1024)
    assert model.predict(work) == pytest.approx(h200_s(work), rel=0.15)


def test_a_first_step_that_compiles_is_forgotten_with_the_next():
    model = StepCostModel()
    model.observe(StepWork(1, 0.5, 0, 0), 0.9)
    teach(model, h200_s, 2, 20)
    assert worst_error(model, h200_s) < 0.15


def test_two_slow_steps_change_nothing_and_a_slower_machine_is_believed():
    model = StepCostModel()
    teach(model, h200_s, 3, 60)
    work = StepWork(2048, 2048 * 512.0, 0, 0)
    before_s = model.predict(work)
    model.observe(work, 10 * before_s)
    model.observe(work, 10 * before_s)
    assert model.predict(work) == before_s
    for _ in range(60):
        model.observe(work, 3 * before_s)
    assert model.predict(work) == pytest.approx(3 * before_s, rel=0.1)


def test_a_machine_that_slows_down_by_a_third_is_followed():
    model = StepCostModel()
    teach(model, h200_s, 4, 300)
    teach(model, lambda work: 1.33 * h200_s(work), 5, 60)
    assert worst_error(model, lambda work: 1.33 * h200_s(work)) < 0.12


def test_no_step_is_ever_predicted_to_take_less_than_nothing():
    model = StepCostModel()
    teach(model, slow_s, 6, 200)
    model.observe(StepWork(4096, 4096 * 2048.0, 0, 0), 1e-3)
    assert model.token_s > 0.0
    assert model.key_s >= 0.0
    assert all(model.predict(work) >= 0.0 for work in works(7, 200))


def test_work_counts_tokens_pairs_rows_and_keys():
    def int32(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    plan = StepPlan(
        step_id=0,
        is_decode=False,
        slots=int32(0, 1, 2, 3),
        num_new_tokens=int32(1, 1, 10, 4),
        prefix_lens=int32(99, 49, 0, 100),
        samples=int32(1, 1, 1, 0),
        input_ids=np.zeros(16, dtype=np.int32),
        out_cache_loc=np.zeros(16, dtype=np.int32),
    )
    assert StepWork.of(plan) == StepWork(14, 10 * 5.0 + 4 * 102.0, 2, 150)
