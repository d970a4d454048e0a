"""100,000 random requests over windows, chunks and states: each gets what it gets alone, and every
account is proved after every commit.
"""

import random
from collections.abc import Callable

import pytest

from attention.memory.layout import CurrentChunk, LastTokens
from tests.unit.workers.scheduler.driver import Driver, make_config
from tests.unit.workers.scheduler.test_scheduler_properties import (
    VOCAB_SIZE,
    begun_elsewhere,
    check_idle,
    check_result,
    is_accepted,
    num_wanted,
)
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams
from workers.scheduler import prefills_under_way, snapshot_memory
from workers.scheduler.config import BoundedAccount, SchedulerConfig

NUM_REQUESTS = 25_000


def random_accounts(rng: random.Random, page_size: int) -> tuple[BoundedAccount, ...]:
    """From memory that is just enough to memory for everything."""
    accounts = []
    for _ in range(rng.choice([1, 1, 2])):
        retention = rng.choice([LastTokens, CurrentChunk])(rng.choice([1, 3, 4, 8, 16, 24]))
        least = BoundedAccount(retention, 1).min_pages(page_size)
        accounts.append(BoundedAccount(retention, least + rng.choice([0, 0, 1, 40]) // page_size))
    return tuple(accounts)


def random_config(rng: random.Random) -> SchedulerConfig:
    page_size = rng.choice([1, 4, 16])
    return make_config(
        page_size=page_size,
        num_pages=1 + -(-rng.choice([48, 64, 80, 128, 400]) // page_size),
        max_running_requests=rng.choice([8, 8, 4, 3, 1]),
        max_context_len=rng.choice([64, 64, 32]),
        max_step_tokens=rng.choice([64, 32, 16, 9, 5, 2, 1]),
        max_waiting_requests=20,
        enable_prefix_cache=rng.random() < 0.8,
        enable_mixed_batches=rng.random() < 0.6,
        vocab_size=VOCAB_SIZE,
        bounded=random_accounts(rng, page_size) if rng.random() < 0.8 else (),
        num_snapshots=rng.choice([0, 0, 1, 4, 30]),
    )


def random_request(rng: random.Random, request_id: str) -> GenerateRequest:
    stem, num_shared = rng.choice([0, 3, 5]), rng.randint(0, 28)
    prompt = [(stem + i * i) % VOCAB_SIZE for i in range(num_shared)]
    prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
    sampling = SamplingParams(
        seed=rng.randint(-3, 3),
        max_tokens=rng.choice([None, rng.randint(1, 32), rng.randint(16, 32)]),
        stop_token_ids=rng.choice([(), (5,)]),
        ignore_eos=rng.random() < 0.6,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, None, None, 1]),
    )
    salt = rng.choice(["", "", "tenant"])
    return GenerateRequest(request_id, prompt, sampling, rng.choice([0, 0, 1, -1]), salt)


def run_traffic(
    rng: random.Random,
    config: SchedulerConfig,
    make_request: Callable[[random.Random, str], GenerateRequest],
) -> int:
    """One engine's life; returns how many requests it took."""
    driver = Driver(config, rng.random() < 0.7, rng.random() < 0.5)
    requests: list[GenerateRequest] = []
    for _ in range(rng.randint(3, 12)):
        for _ in range(rng.randint(1, 5)):
            request = make_request(rng, f"r{len(requests)}")
            if rng.random() < 0.15 and num_wanted(driver.config, request) > 0:
                request = begun_elsewhere(driver, request, rng.randint(1, 32))
            if is_accepted(driver, request):
                requests.append(request)
        for _ in range(rng.randint(1, 20)):
            driver.step()
        if requests and rng.random() < 0.3:
            driver.scheduler.abort(rng.choice(requests).request_id)
        if rng.random() < 0.1:
            driver.fail_row(rng.randrange(8))
    driver.finish()
    for request in requests:
        check_result(driver, request)
    check_idle(driver)
    return len(requests)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_what_it_gets_alone(seed, monkeypatch) -> None:
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "PROMPT_ROLL_TOKENS", 8)
    num_requests = num_lives = 0
    while num_requests < NUM_REQUESTS:
        rng = random.Random(1_000_000 * seed + num_lives)
        num_requests += run_traffic(rng, random_config(rng), random_request)
        num_lives += 1
    assert num_lives > NUM_REQUESTS // 60
