"""Keys and values that may be no numbers: never shared, cleared before their pages serve others."""

import random

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import EOS, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import cache_indices_of, run_alone
from workers.engine.protocol import FinishReason
from workers.kv_cache.radix_node import IntArray
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
    """A pool of one number a token. From EOS in its input on a request writes and samples NaN.

    Like an attention kernel that loads whole pages: a row must find no NaN in its pages beyond
    what it wrote itself.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = np.zeros(config.num_pages * config.page_size)
        self._bad_slots: set[int] = set()
        self._page_size = config.page_size
        # Of each slot, where a token of each position stands.
        self._places: dict[int, dict[int, int]] = {}
        self._encode, self._decode = make_plan_encoder().encode, make_plan_decoder().decode

    def run(self, plan: StepPlan) -> StepResult:
        plan = self._decode(self._encode(plan))
        self.pool[plan.cleared] = 0.0
        for admitted in plan.admitted:
            self._places[admitted.slot] = {}
            self._bad_slots.discard(admitted.slot)
        for write in plan.table_writes:
            indices = cache_indices_of(write, self._page_size)
            for slot in write.slots.tolist():
                self._place(slot, write.first_page * self._page_size, indices)
        token_ids, chunk_has_nan = [], []
        first = 0
        for slot, prefix_len, num_new, samples in zip(
            plan.slots.tolist(),
            plan.prefix_lens.tolist(),
            plan.num_new_tokens.tolist(),
            plan.samples.tolist(),
            strict=True,
        ):
            new = plan.out_cache_loc[first : first + num_new]
            if (plan.input_ids[first : first + num_new] == EOS).any():
                self._bad_slots.add(slot)
            first += num_new
            self._place(slot, prefix_len, new)
            is_bad = slot in self._bad_slots
            self.pool[new] = np.nan if is_bad else 1.0
            if not is_bad:
                self._check_pages(slot)
            if samples:
                token_ids.append(NAN_TOKEN if is_bad else 7)
            else:
                chunk_has_nan.append(is_bad)
        tokens = np.array(token_ids, dtype=np.int32)
        return StepResult(tokens, chunk_has_nan=tuple(chunk_has_nan))

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


def half_a_prefill(num_committed: int) -> tuple[Driver, list[np.ndarray]]:
    """A prompt of 24 tokens in chunks of 8, two of them launched, and where each chunk went."""
    driver = Driver(make_config(max_step_tokens=8), is_overlapped=True)
    driver.submit(make_request("r", list(range(2, 26))))
    driver.launch()
    driver.launch()
    for _ in range(num_committed):
        driver.commit()
    return driver, [plan.out_cache_loc for plan in driver.plans]


def test_chunks_that_are_committed_are_kept_when_the_prefill_is_aborted():
    driver, (_, second) = half_a_prefill(num_committed=1)
    driver.scheduler.abort("r")
    assert driver.scheduler.stats().num_evictable_pages == 2
    driver.commit()
    driver.submit(make_request("again", list(range(2, 26)), max_tokens=1))
    driver.launch()
    assert cleared_of(driver) == sorted(second.tolist())
    assert driver.plans[-1].prefix_lens.tolist() == [8]
    driver.finish()
    assert driver.outputs["again"][0].num_cached_tokens == 8


def test_a_chunk_ends_within_a_page_and_vouches_for_whole_pages_only():
    driver = Driver(make_config(max_step_tokens=7))
    driver.submit(make_request("r", list(range(2, 26))))
    driver.step()
    driver.scheduler.abort("r")
    assert driver.scheduler.stats().num_evictable_pages == 1
    driver.submit(make_request("other", [3]))
    driver.step()
    assert cleared_of(driver) == [], "all that was written is known to be numbers"
    driver.finish()


def test_a_retracted_prefill_leaves_its_committed_chunks_in_the_cache():
    config = make_config(page_size=1, num_pages=31, max_step_tokens=6, max_context_len=31)
    driver = Driver(config, has_reserve=False)
    driver.submit(make_request("first", [3] * 4, max_tokens=26))
    second = make_request("second", list(range(2, 28)), max_tokens=4)
    driver.submit(second)
    before = 0
    while not driver.scheduler.stats().num_preemptions:
        before = driver.scheduler.stats().num_used_pages
        driver.step()
    assert driver.outputs["second"] == [], "it had not even begun to answer"
    left = driver.scheduler.stats()
    assert left.num_evictable_pages > 0.5 * before, "what it had computed waits for it"
    driver.finish()
    assert driver.tokens("second") == run_alone(config, second).token_ids


def chunk_result(plan: StepPlan, has_nan: bool) -> StepResult:
    """Of a plan of one row."""
    tokens = np.full(int(plan.samples.sum()), 7, dtype=np.int32)
    return StepResult(tokens, chunk_has_nan=() if len(tokens) else (has_nan,))


def test_a_chunk_without_a_number_is_not_vouched_for_and_ends_nobody():
    """Numbers that later tokens make of it vouch for it after all."""
    scheduler = Scheduler(make_config(page_size=PAGE_SIZE, max_step_tokens=8))
    scheduler.submit(make_request("r", list(range(2, 26)), max_tokens=1))
    cached = []
    for has_nan in (True, False, False):
        plan = scheduler.schedule()
        assert plan is not None
        outputs = scheduler.commit(plan, chunk_result(plan, has_nan))
        request = scheduler._ledger.get("r")
        cached.append(None if request is None else request.num_vouched_tokens)
    assert cached == [0, 16, None]
    assert outputs[0].finish_reason is FinishReason.LENGTH


def test_chunks_before_the_first_nan_are_kept_and_those_from_it_on_cleared():
    config = make_config(page_size=PAGE_SIZE, max_step_tokens=8)
    scheduler, device = Scheduler(config), NanDevice(config)
    prompt = list(range(2, 26))
    prompt[13] = EOS
    scheduler.submit(make_request("bad", prompt))
    chunks = []
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        chunks.append(plan.out_cache_loc)
        scheduler.commit(plan, device.run(plan))
    scheduler.abort("bad")
    assert scheduler.stats().num_evictable_pages == 2
    scheduler.submit(make_request("good", [3]))
    plan = scheduler.schedule()
    assert plan is not None
    assert sorted(plan.cleared) == sorted(chunks[1])
    device.run(plan)
    assert not np.isnan(device.pool).any()


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
        cached = scheduler._cache.all_pages()
        assert not np.isnan(device.pool.reshape(-1, PAGE_SIZE)[cached]).any(), "NaN is shared"
