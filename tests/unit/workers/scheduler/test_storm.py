"""Many requests through a pool that is far too small, in every mode of the scheduler."""

import random

import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import GenerateRequest
from workers.scheduler import prefills_under_way, snapshot_memory
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.prefills_under_way import MIN_SAVED_TOKENS


def make_requests(rng: random.Random, num_requests: int) -> list[GenerateRequest]:
    stems = [[rng.randrange(32) for _ in range(24)] for _ in range(3)]
    requests = []
    for i in range(num_requests):
        prompt = rng.choice(stems)[: rng.randrange(24)]
        prompt = prompt + [rng.randrange(32) for _ in range(rng.randrange(1, 8))]
        requests.append(
            make_request(
                f"r{i}",
                prompt,
                priority=rng.choice([0, 0, 1]),
                salt=rng.choice(["", "", "tenant"]),
                seed=rng.randrange(4),
                max_tokens=rng.randrange(1, 33),
                ignore_eos=rng.random() < 0.8,
                prompt_logprobs=rng.choice([None] * 7 + [0]),
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone():
    """What requests get alone, run once a configuration: overlap and reserve are not in it."""
    known: dict[SchedulerConfig, list[list[int]]] = {}

    def run(config: SchedulerConfig, requests: list[GenerateRequest]):
        if config not in known:
            known[config] = [run_alone(config, request).token_ids for request in requests]
        return known[config]

    return run


@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.nightly), 16])
@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize(
    ("enable_prefix_cache", "min_saved_tokens", "num_snapshots"),
    [
        (False, MIN_SAVED_TOKENS, 0),
        (True, MIN_SAVED_TOKENS, 0),
        (True, 4, 0),
        (True, 4, 7),
    ],
)
# The other pairs of these two are drawn in test_scheduler_properties.py.
@pytest.mark.parametrize(("enable_mixed_batches", "has_reserve"), [(False, True), (True, False)])
def test_every_request_gets_what_it_gets_alone(
    page_size: int,
    is_overlapped: bool,
    enable_prefix_cache: bool,
    min_saved_tokens: int,
    num_snapshots: int,
    enable_mixed_batches: bool,
    has_reserve: bool,
    monkeypatch: pytest.MonkeyPatch,
    alone,
):
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", min_saved_tokens)
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "PROMPT_ROLL_TOKENS", 8)
    rng = random.Random(page_size)
    config = make_config(
        page_size=page_size,
        num_pages=1 + 96 // page_size,
        max_step_tokens=rng.choice([12, 24]),
        enable_prefix_cache=enable_prefix_cache,
        enable_mixed_batches=enable_mixed_batches,
        num_snapshots=num_snapshots,
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
    for request, expected in zip(requests, alone(config, requests), strict=True):
        tokens = driver.tokens(request.request_id)
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == len(expected) or driver.is_aborted(request.request_id)
    stats = driver.scheduler.stats()
    assert stats.num_finished == 40
    assert (stats.num_used_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_preemptions > 0 or has_reserve
