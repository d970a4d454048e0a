"""Keys and values that may be no numbers: never shared, cleared before their pages serve others."""

import random

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import EOS, Driver, make_config, make_request
from workers.kv_cache.radix_node import IntArray
from workers.protocol import FinishReason
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import (
    NAN_TOKEN,
    StepPlan,
    StepResult,
    make_plan_decoder,
    make_plan_encoder,
)
from workers.scheduler.scheduler import Scheduler

PAGE_SIZE = 4


class NanDevice:
    """A pool of one number a token. Rows of slots in bad_slots write NaN and sample NaN.

    Like an attention kernel that loads whole pages: a row must find no NaN in its pages beyond
    what it wrote itself.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = np.zeros(config.num_pages * config.page_size)
        self.bad_slots: set[int] = set()
        self.is_bad_prompt = lambda token_ids: bool((token_ids == EOS).any())
        self._page_size = config.page_size
        # Of each slot, where a token of each position stands.
        self._places: dict[int, dict[int, int]] = {}
        self._encode, self._decode = make_plan_encoder().encode, make_plan_decoder().decode

    def run(self, plan: StepPlan) -> StepResult:
        plan = self._decode(self._encode(plan))
        self.pool[plan.cleared] = 0.0
        for admitted in plan.admitted:
            self._places[admitted.slot] = {}
            is_bad = self.is_bad_prompt(admitted.token_ids)
            (self.bad_slots.add if is_bad else self.bad_slots.discard)(admitted.slot)
        for write in plan.table_writes:
            self._place(write.slot, write.start, write.cache_indices)
        token_ids = []
        first = 0
        for slot, prefix_len, num_new, samples in zip(
            plan.slots.tolist(),
            plan.prefix_lens.tolist(),
            plan.num_new_tokens.tolist(),
            plan.samples.tolist(),
            strict=True,
        ):
            new = plan.out_cache_loc[first : first + num_new]
            first += num_new
            self._place(slot, prefix_len, new)
            is_bad = slot in self.bad_slots
            self.pool[new] = np.nan if is_bad else 1.0
            if not is_bad:
                self._check_pages(slot)
            if samples:
                token_ids.append(NAN_TOKEN if is_bad else 7)
        return StepResult(np.array(token_ids, dtype=np.int32))

    def _place(self, slot: int, start: int, cache_indices: IntArray) -> None:
        self._places[slot].update(enumerate(cache_indices.tolist(), start))

    def _check_pages(self, slot: int) -> None:
        for page in {place // self._page_size for place in self._places[slot].values()}:
            values = self.pool[page * self._page_size : (page + 1) * self._page_size]
            assert not np.isnan(values).any(), f"slot {slot} was given page {page} with NaN in it"


def cleared_of(driver: Driver) -> list[int]:
    return sorted(driver.plans[-1].cleared.tolist())


def test_a_request_without_a_number_leaves_its_own_tokens_to_be_cleared():
    config = make_config(page_size=PAGE_SIZE)
    scheduler, device = Scheduler(config), NanDevice(config)
    scheduler.submit(make_request("bad", [EOS] * 6))
    scheduler.submit(make_request("good", [3] * 5, max_tokens=9))
    plan = scheduler.schedule()
    assert plan is not None
    outputs = scheduler.commit(plan, device.run(plan))
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, None]
    following = scheduler.schedule()
    assert following is not None
    assert sorted(following.cleared) == sorted(plan.out_cache_loc[:6])
    device.run(following)
    assert not np.isnan(device.pool).any()
    assert scheduler.stats().num_evictable_pages == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_prefill_that_is_aborted_half_way_is_cleared_and_not_shared(num_steps: int):
    driver = Driver(make_config(max_step_tokens=8), is_overlapped=True)
    driver.submit(make_request("r", list(range(2, 26))))
    for _ in range(num_steps):
        driver.launch()
    written = np.concatenate([plan.out_cache_loc for plan in driver.plans])
    driver.scheduler.abort("r")
    assert driver.scheduler.stats().num_evictable_pages == 0
    while driver.has_launched:
        driver.commit()
    driver.submit(make_request("other", [3]))
    driver.launch()
    assert cleared_of(driver) == sorted(written.tolist())
    driver.finish()


def test_the_token_of_a_step_that_runs_on_after_the_last_one_is_cleared():
    """A stop id is seen when the step after it is under way already."""
    driver = Driver(make_config(), is_overlapped=True)
    prompt = list(range(2, 7))
    first = Driver(make_config())
    first.submit(make_request("r", prompt, max_tokens=1))
    first.finish()
    (stop_id,) = first.tokens("r")
    driver.submit(make_request("r", prompt, stop_token_ids=(stop_id,)))
    driver.submit(make_request("other", [9] * 3, max_tokens=12))
    driver.launch()
    driver.launch()
    driver.commit()
    in_flight = driver.plans[-1]
    row = in_flight.prefix_lens.tolist().index(len(prompt))
    driver.launch()
    assert cleared_of(driver) == [in_flight.out_cache_loc[row]]
    driver.commit()
    driver.finish()


def test_whoever_ends_at_its_limit_leaves_nothing_to_clear():
    driver = Driver(make_config(), is_overlapped=True)
    driver.submit(*(make_request(f"r{i}", [3 + i] * (5 + i), max_tokens=4 + i) for i in range(3)))
    driver.finish()
    assert not any(len(plan.cleared) for plan in driver.plans)


def test_what_a_prefix_hit_shares_is_never_cleared():
    config = make_config(page_size=PAGE_SIZE)
    scheduler, device = Scheduler(config), NanDevice(config)
    shared = list(range(2, 10))
    scheduler.submit(make_request("good", shared, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, device.run(plan))
    scheduler.submit(make_request("bad", [*shared, EOS, 5]))
    hit = scheduler.schedule()
    assert hit is not None
    assert hit.num_new_tokens.tolist() == [2]
    scheduler.commit(hit, device.run(hit))
    scheduler.submit(make_request("again", [*shared, 6]))
    again = scheduler.schedule()
    assert again is not None
    assert sorted(again.cleared) == sorted(hit.out_cache_loc)
    assert again.prefix_lens.tolist() == [8]
    device.run(again)


@pytest.mark.parametrize("seed", range(12))
def test_no_row_ever_finds_nan_in_its_pages(seed: int):
    """Random good and bad prompts, aborts and retractions in a pool that is too small."""
    rng = random.Random(seed)
    config = make_config(page_size=PAGE_SIZE, num_pages=17, max_step_tokens=12)
    scheduler, device = Scheduler(config), NanDevice(config)
    launched: list[tuple[StepPlan, StepResult]] = []
    alive: list[str] = []
    for turn in range(400):
        if rng.random() < 0.4:
            prompt = [rng.randrange(2, 5) for _ in range(rng.randrange(1, 24))]
            if rng.random() < 0.3:
                prompt[rng.randrange(len(prompt))] = EOS
            alive.append(f"r{turn}")
            scheduler.submit(make_request(alive[-1], prompt, max_tokens=rng.randrange(1, 12)))
        if alive and rng.random() < 0.15:
            scheduler.abort(alive.pop(rng.randrange(len(alive))))
        plan = scheduler.schedule()
        if plan is not None:
            launched.append((plan, device.run(plan)))
        if launched and (plan is None or len(launched) == 2):
            scheduler.commit(*launched.pop(0))
        scheduler.check_integrity()
