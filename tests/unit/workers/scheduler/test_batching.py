"""Which rows a step has: budget, chunks, order, mixed and alternating steps, room for output."""

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.scheduler.plan import LAST_SAMPLED_TOKEN, StepPlan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(tokens already there, new tokens, samples) of each row."""
    arrays = (plan.prefix_lens, plan.num_new_tokens, plan.samples)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def admitted_lengths(plan: StepPlan) -> list[int]:
    return [admitted.num_prompt_tokens for admitted in plan.admitted]


def test_an_idle_scheduler_has_no_plan():
    driver = Driver(make_config())
    assert driver.launch() is None
    assert not driver.scheduler.has_work


def test_a_prompt_is_prefilled_in_one_step_and_then_decoded():
    driver = Driver(make_config())
    driver.submit(make_request("r", [5, 6, 7], max_tokens=3))
    driver.finish()
    prefill, *decodes = driver.plans
    assert prefill.input_ids.tolist() == [5, 6, 7]
    assert rows(prefill) == [(0, 3, 1)]
    assert not prefill.is_decode
    assert [rows(plan) for plan in decodes] == [[(3, 1, 1)], [(4, 1, 1)]]
    assert all(plan.input_ids.tolist() == [LAST_SAMPLED_TOKEN] for plan in decodes)
    assert all(plan.is_decode for plan in decodes)
    assert [plan.step_id for plan in driver.plans] == [0, 1, 2]


def test_a_long_prompt_is_chunked_and_samples_only_at_its_end():
    driver = Driver(make_config(max_step_tokens=8))
    driver.submit(make_request("r", list(range(2, 22)), max_tokens=2))
    driver.finish()
    assert [rows(plan) for plan in driver.plans] == [
        [(0, 8, 0)],
        [(8, 8, 0)],
        [(16, 4, 1)],
        [(20, 1, 1)],
    ]
    assert [admitted_lengths(plan) for plan in driver.plans] == [[20], [], [], []]


def test_a_mixed_step_decodes_first_and_fills_up_with_chunks():
    driver = Driver(make_config(max_step_tokens=8))
    driver.submit(make_request("a", [3] * 4))
    driver.step()
    driver.submit(make_request("b", [4] * 9), make_request("c", [5] * 9))
    driver.step()
    driver.step()
    assert rows(driver.plans[1]) == [(4, 1, 1), (0, 7, 0)]
    assert rows(driver.plans[2]) == [(5, 1, 1), (7, 2, 1), (0, 5, 0)]


def test_a_mixed_step_of_single_tokens_counts_as_decode():
    driver = Driver(make_config())
    driver.submit(make_request("a", [3] * 4))
    driver.step()
    driver.submit(make_request("b", [4]))
    driver.step()
    assert driver.plans[1].is_decode
    assert driver.plans[1].input_ids.tolist() == [LAST_SAMPLED_TOKEN, 4]


def test_alternating_steps_never_mix_and_neither_kind_starves():
    driver = Driver(make_config(max_step_tokens=8, enable_mixed_batches=False))
    driver.submit(make_request("a", [3] * 4, max_tokens=20))
    driver.step()
    driver.submit(make_request("b", [4] * 24, max_tokens=4))
    for _ in range(6):
        driver.step()
    kinds = [plan.is_decode for plan in driver.plans]
    assert kinds == [False, True, False, True, False, True, False]
    assert all(plan.is_decode or LAST_SAMPLED_TOKEN not in plan.input_ids for plan in driver.plans)
    driver.finish()


def test_waiting_requests_are_admitted_by_priority_then_arrival():
    driver = Driver(make_config(max_step_tokens=4, max_running_requests=2))
    for length, priority in ((2, 1), (3, 0), (4, 1), (5, -1)):
        driver.submit(make_request(f"r{length}", [3] * length, priority=priority, max_tokens=2))
    driver.finish()
    order = [length for plan in driver.plans for length in admitted_lengths(plan)]
    assert order == [5, 3, 2, 4]


def test_a_small_request_does_not_overtake_the_head_of_the_queue():
    driver = Driver(make_config(num_pages=9, page_size=4, enable_prefix_cache=False))
    driver.submit(make_request("a", [3] * 16, max_tokens=2))
    driver.step()
    driver.submit(make_request("big", [4] * 24, max_tokens=2), make_request("small", [5]))
    driver.step()
    assert driver.plans[-1].batch_size == 1
    assert driver.scheduler.stats().num_waiting == 2
    driver.finish()


@pytest.mark.parametrize(("max_running", "max_step_tokens", "limit"), [(3, 64, 3), (8, 2, 2)])
def test_no_more_run_at_once_than_slots_and_budget_allow(
    max_running: int, max_step_tokens: int, limit: int
):
    driver = Driver(make_config(max_running_requests=max_running, max_step_tokens=max_step_tokens))
    driver.submit(*(make_request(f"r{i}", [3 + i]) for i in range(6)))
    most = 0
    for _ in driver.steps():
        most = max(most, driver.scheduler.stats().num_running)
    assert most == limit


def test_admission_leaves_room_for_the_output_of_what_runs():
    """Two would fit now, but not with a good part of their output."""
    driver = Driver(make_config(num_pages=17, page_size=4, enable_prefix_cache=False))
    prompts = {"a": [3] * 24, "b": [4] * 24}
    driver.submit(*(make_request(name, prompts[name], max_tokens=40) for name in prompts))
    driver.step()
    assert driver.scheduler.stats().num_running == 1
    driver.finish()
    assert driver.scheduler.stats().num_preemptions == 0


def test_new_tokens_go_to_pages_of_their_own_row():
    driver = Driver(make_config(page_size=4))
    driver.submit(*(make_request(f"r{i}", [3 + i] * (5 + i), max_tokens=9) for i in range(3)))
    owners: dict[int, int] = {}
    driver.finish()
    for plan in driver.plans:
        slots = np.repeat(plan.slots, plan.num_new_tokens)
        for slot, page in zip(slots.tolist(), (plan.out_cache_loc // 4).tolist(), strict=True):
            assert owners.setdefault(page, slot) == slot


def test_a_request_may_hold_any_number_of_pages():
    config = make_config(page_size=1, num_pages=301, max_context_len=300)
    driver = Driver(config)
    requests = [make_request(f"r{i}", [3 + i] * (60 + 80 * i), max_tokens=60) for i in range(2)]
    driver.submit(*requests)
    driver.finish()
    for request in requests:
        assert driver.tokens(request.request_id) == run_alone(config, request).token_ids


def test_stats_tell_what_waits_and_what_runs():
    driver = Driver(make_config(page_size=4, max_step_tokens=8, enable_prefix_cache=False))
    driver.submit(make_request("a", [3] * 12, max_tokens=4), make_request("b", [4] * 5))
    stats = driver.scheduler.stats()
    assert (stats.num_waiting, stats.queued_tokens, stats.num_used_pages) == (2, 17, 0)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.queued_tokens, stats.running_tokens) == (9, 8)
    assert (stats.num_pages, stats.num_used_pages, stats.num_steps) == (64, 2, 1)
    driver.finish()
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_finished) == (17, 12, 2)
    assert (stats.num_used_pages, stats.running_tokens, stats.queued_tokens) == (0, 0, 0)
