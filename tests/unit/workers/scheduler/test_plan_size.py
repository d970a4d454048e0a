"""Plans stay small however long the cached texts are that their requests begin with."""

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import cache_indices_of
from workers.kv_cache.radix_cache import RadixCache
from workers.scheduler import plan_draft
from workers.scheduler.plan import make_plan_encoder
from workers.scheduler.prefix_writes import prefix_writes
from workers.scheduler.scheduler import Scheduler

DOCUMENT = [2 + i * i % 29 for i in range(40_000)]
NUM_REQUESTS = 64


def many_over_one_document(page_size: int, **sampling) -> tuple[int, int]:
    """(bytes of the frame, requests) of the plan that admits requests over a cached document."""
    config = make_config(
        page_size=page_size,
        num_pages=1 + (len(DOCUMENT) + 300 * (page_size + 8)) // page_size,
        max_running_requests=NUM_REQUESTS,
        max_context_len=50_000,
        max_step_tokens=1 << 16,
        max_waiting_requests=NUM_REQUESTS,
        max_waiting_tokens=1 << 30,
    )
    scheduler = Scheduler(config)
    root_pages = np.arange(1, 1 + len(DOCUMENT) // page_size, dtype=np.int32)
    (taken,) = scheduler._pool.allocate(len(root_pages))
    assert taken is not None
    scheduler._cache.insert(np.array(DOCUMENT, dtype=np.int32), taken, "")
    for i in range(NUM_REQUESTS):
        prompt = [*DOCUMENT, 2 + i % 20, 5]
        scheduler.submit(make_request(f"r{i}", prompt, max_tokens=2, **sampling))
    plan = scheduler.schedule()
    assert plan is not None
    return len(make_plan_encoder().encode(plan)), len(plan.admitted)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_cached_document_is_named_once_and_in_pages(page_size: int):
    frame_bytes, num_admitted = many_over_one_document(page_size)
    assert num_admitted == NUM_REQUESTS
    document_bytes = 4 * len(DOCUMENT) // page_size
    assert frame_bytes < document_bytes + NUM_REQUESTS * (400 + 8 * page_size)


@pytest.mark.parametrize(
    ("sampling", "ids_a_request"),
    [({"presence_penalty": 1.0}, 0), ({"repetition_penalty": 1.2}, 29)],
)
def test_only_a_repetition_penalty_brings_prompt_ids_and_each_once(sampling, ids_a_request: int):
    plain, _ = many_over_one_document(64)
    penalised, num_admitted = many_over_one_document(64, **sampling)
    assert num_admitted == NUM_REQUESTS
    assert penalised - plain <= NUM_REQUESTS * (4 * ids_a_request + 32)


def test_histories_that_would_swell_a_plan_wait_for_the_next_one(monkeypatch):
    monkeypatch.setattr(plan_draft, "MAX_HISTORY_IDS", 5)
    driver = Driver(make_config())
    prompts = [[2 + i, 9, 12, 17] for i in range(4)]
    driver.submit(
        *(make_request(f"r{i}", prompt, repetition_penalty=1.2) for i, prompt in enumerate(prompts))
    )
    driver.step()
    assert len(driver.plans[0].admitted) == 2
    driver.finish()
    ids = [admitted.prompt_ids.tolist() for plan in driver.plans for admitted in plan.admitted]
    assert ids == [sorted(prompt) for prompt in prompts]


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_every_slot_gets_its_path_and_every_page_is_named_once(page_size: int, seed: int):
    rng = np.random.default_rng(seed)
    cache = RadixCache(page_size, clock=lambda: 0)
    num_pages = 0
    for _ in range(30):
        tokens = rng.integers(0, 2, page_size * rng.integers(1, 9), dtype=np.int32)
        pages = np.arange(len(tokens) // page_size, dtype=np.int32) + 1 + num_pages
        cache.insert(tokens, pages, "")
        num_pages += len(pages)
    prefixes = []
    for slot in range(25):
        wanted = rng.integers(0, 2, page_size * 6, dtype=np.int32)
        prefixes.append((slot, cache.match_prefix(wanted, "").node))
    table = {slot: np.zeros(9 * page_size, dtype=np.int32) for slot, _ in prefixes}
    writes = prefix_writes(prefixes)
    for write in writes:
        indices = cache_indices_of(write, page_size)
        start = write.first_page * page_size
        for slot in write.slots.tolist():
            assert not table[slot][start : start + len(indices)].any(), "written twice"
            table[slot][start : start + len(indices)] = indices
    for slot, node in prefixes:
        path = node.path_pages()
        assert (
            table[slot][: len(path) * page_size : page_size].tolist() == (path * page_size).tolist()
        )
        assert not table[slot][len(path) * page_size :].any()
    named = np.concatenate([write.pages for write in writes])
    assert len(np.unique(named)) == len(named)
    assert len(writes) < 2 * len(prefixes)
