"""Rows that verify drafts: lengths are upper bounds until commits say what was right."""

import random

import msgspec
import numpy as np
import pytest

from attention.forward_batch import ForwardMode
from attention.memory.layout import LastTokens
from tests.unit.workers.scheduler.driver import TIGHT, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from tests.unit.workers.scheduler.test_storm import make_requests
from workers.errors import ConfigError
from workers.scheduler.config import BoundedAccount
from workers.scheduler.plan import NAN_TOKEN, StepResult


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("has_reserve", [False, True])
@pytest.mark.parametrize("max_draft_tokens", [1, 5])
def test_every_request_gets_what_it_gets_alone(
    page_size: int, is_overlapped: bool, has_reserve: bool, max_draft_tokens: int
):
    rng = random.Random(page_size)
    config = make_config(
        page_size=page_size,
        num_pages=1 + 128 // page_size,
        max_step_tokens=rng.choice([24, 64]),
        max_draft_tokens=max_draft_tokens,
    )
    driver = Driver(config, is_overlapped, has_reserve)
    requests = make_requests(rng, 40)
    for request in requests:
        driver.submit(request)
        if rng.random() < 0.3:
            driver.step()
        if rng.random() < 0.1:
            driver.scheduler.abort(rng.choice(requests[: len(driver.outputs)]).request_id)
    driver.finish()
    for request in requests:
        tokens = driver.tokens(request.request_id)
        expected = run_alone(config, request).token_ids
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == len(expected) or driver.is_aborted(request.request_id)
    stats = driver.scheduler.stats()
    assert stats.num_finished == 40
    assert (stats.num_used_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_steps < stats.num_output_tokens
    assert sum(stats.accepted_by_position) == stats.num_accepted_draft_tokens
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert stats.accepted_by_position[0] <= stats.num_drafted_runs <= stats.num_draft_tokens
    assert len(stats.accepted_by_position) == max_draft_tokens


def test_a_run_is_one_token_and_its_drafts():
    driver = Driver(make_config(max_draft_tokens=3))
    driver.submit(
        make_request("a", [1, 2, 3], max_tokens=20), make_request("b", [4], max_tokens=20)
    )
    driver.step()
    driver.step()
    plan = driver.plans[1]
    assert plan.num_new_tokens.tolist() == plan.samples.tolist() == [4, 4]
    assert plan.input_ids.tolist() == [-1, -2, -2, -2] * 2
    assert (plan.shape.mode, plan.shape.rows, plan.shape.tokens_per_row) == (
        ForwardMode.TARGET_VERIFY,
        2,
        4,
    )


def test_no_draft_goes_beyond_the_last_token():
    """The last one is sampled from the one before, so that a run of two ends at the limit."""
    driver = Driver(make_config(max_draft_tokens=6))
    driver.submit(make_request("a", [1, 2, 3], max_tokens=3))
    driver.step()
    assert driver.launch().num_new_tokens.tolist() == [2]
    driver.commit()
    driver.finish()
    assert len(driver.tokens("a")) == 3


def test_rows_with_penalties_have_drafts_as_others_do():
    driver = Driver(make_config(max_draft_tokens=3))
    driver.submit(
        make_request("plain", [1, 2], max_tokens=20),
        make_request("penalised", [3, 4], max_tokens=20, presence_penalty=0.5),
    )
    driver.step()
    plan = driver.launch()
    assert plan.num_new_tokens.tolist() == [4, 4]
    assert plan.shape.mode is ForwardMode.TARGET_VERIFY
    driver.commit()
    driver.finish()


def test_a_request_may_ask_for_fewer_drafts_or_for_none_but_not_for_more():
    driver = Driver(make_config(max_draft_tokens=3))
    for name, asked in (("none", 0), ("two", 2), ("many", 9), ("open", None)):
        request = make_request(name, [len(name)], max_tokens=20)
        driver.submit(msgspec.structs.replace(request, max_draft_tokens=asked))
    driver.step()
    assert driver.launch().num_new_tokens.tolist() == [1, 3, 4, 4]
    driver.commit()
    driver.finish()


def test_drafts_leave_half_of_a_step_to_prompts():
    driver = Driver(make_config(max_draft_tokens=6, max_step_tokens=12))
    driver.submit(make_request("a", [1, 2], max_tokens=20))
    driver.step()
    driver.submit(make_request("b", list(range(2, 30)), max_tokens=4))
    plan = driver.launch()
    assert plan.num_new_tokens.tolist() == [6, 6]
    assert plan.shape.mode is ForwardMode.EXTEND
    driver.commit()
    driver.finish()


def test_where_pages_are_short_rows_go_on_without_drafts_before_anybody_is_retracted():
    driver = Driver(make_config(max_draft_tokens=3, **TIGHT), has_reserve=False)
    driver.submit(*(make_request(name, [1, 2, 3, 4, 5, 6], max_tokens=16) for name in "ab"))
    sizes = []
    while not driver.scheduler.stats().num_preemptions and driver.scheduler.has_work:
        driver.step()
        sizes.append(int(driver.plans[-1].num_new_tokens.max()))
    driver.finish()
    config = driver.config
    for name in "ab":
        request = make_request(name, [1, 2, 3, 4, 5, 6], max_tokens=16)
        assert driver.tokens(name) == run_alone(config, request).token_ids
    assert 4 in sizes


def test_a_request_is_admitted_with_all_its_tokens_for_who_proposes():
    driver = Driver(make_config(max_draft_tokens=2))
    driver.submit(make_request("a", [1, 2, 3]))
    driver.launch()
    assert driver.plans[0].admitted[0].known_ids.tolist() == [1, 2, 3]
    plain = Driver(make_config())
    plain.submit(make_request("a", [1, 2, 3]))
    assert len(plain.launch().admitted[0].known_ids) == 0


def result_of(token_ids: list[int], run_lens: list[int]) -> StepResult:
    return StepResult(
        np.array(token_ids, dtype=np.int32), run_lens=np.array(run_lens, dtype=np.int32)
    )


@pytest.mark.parametrize(
    ("token_ids", "run_lens"),
    [([5], []), ([5, 6], [1]), ([], [0]), ([5] * 5, [5]), ([5, 5], [1, 1])],
)
def test_a_result_that_does_not_fit_the_runs_is_refused(token_ids: list[int], run_lens: list[int]):
    driver = Driver(make_config(max_draft_tokens=3))
    driver.submit(make_request("a", [1, 2], max_tokens=20))
    driver.step()
    plan = driver.scheduler.schedule()
    with pytest.raises(ValueError, match="3 drafts"):
        driver.scheduler.commit(plan, result_of(token_ids, run_lens))


def test_a_run_ends_with_its_request():
    """Tokens behind a stop id are nobody's, and pages go back."""
    driver = Driver(make_config(max_draft_tokens=3))
    driver.submit(make_request("a", [1, 2], max_tokens=20, stop_token_ids=(9,)))
    driver.step()
    plan = driver.scheduler.schedule()
    (output,) = driver.scheduler.commit(plan, result_of([5, 9, 7, 8], [4]))
    assert (output.token_ids, output.stop_token_id) == ([5, 9], 9)
    driver.scheduler.check_integrity()
    assert driver.scheduler.stats().num_used_pages == 0


def test_a_run_without_a_number_ends_its_request():
    driver = Driver(make_config(max_draft_tokens=3))
    driver.submit(make_request("a", [1, 2], max_tokens=20))
    driver.step()
    plan = driver.scheduler.schedule()
    (output,) = driver.scheduler.commit(plan, result_of([5, NAN_TOKEN], [2]))
    assert output.error is not None
    driver.scheduler.check_integrity()


def test_what_wrong_drafts_left_is_cleared_when_their_pages_go_back():
    """Whoever gets the pages may load what no key of theirs stands in."""
    driver = Driver(make_config(max_draft_tokens=6, page_size=16))
    driver.submit(make_request("a", [1, 2], max_tokens=20, stop_token_ids=(9,)))
    driver.step()
    plan = driver.scheduler.schedule()
    written = set(plan.out_cache_loc.tolist())
    driver.scheduler.commit(plan, result_of([5, 9], [2]))
    driver.submit(make_request("b", [3, 4]))
    cleared = set(driver.scheduler.schedule().cleared.tolist())
    # What the run's first two tokens left is known to be numbers, as the second sample is one.
    assert written - cleared == set(plan.out_cache_loc[:2].tolist())


def test_windows_and_drafts_are_refused_together():
    with pytest.raises(ConfigError, match="speculative"):
        make_config(max_draft_tokens=1, bounded=(BoundedAccount(LastTokens(4), 40),))
