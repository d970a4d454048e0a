"""What a plan changes in memory, against its definition."""

import numpy as np
import pytest
import torch

from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from workers.kv_cache.radix_node import EMPTY
from workers.runner.step_inputs import StepInputBuilder
from workers.scheduler.plan import StepPlan, TableWrite

NUM_SLOTS, MAX_CONTEXT_LEN, NUM_PAGES = 6, 2048, 400
CPU = torch.device("cpu")


class PagesOnly(MHATokenToKVPool):
    """A pool that is asked for its page size only."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size


def plan_of(writes: list[TableWrite]) -> StepPlan:
    return StepPlan(0, True, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, table_writes=tuple(writes))


@pytest.mark.parametrize("page_size", [1, 2, 7, 64, 128, 256])
@pytest.mark.parametrize("seed", range(5))
def test_pages_become_the_cache_indices_of_their_tokens(page_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = ReqToTokenPool(NUM_SLOTS, MAX_CONTEXT_LEN, CPU)
    table.req_to_token.fill_(-1)
    expected = table.req_to_token.numpy().copy()
    pool = PagesOnly(page_size)
    writes = []
    for _ in range(rng.integers(1, 6)):
        num_pages = int(rng.integers(1, MAX_CONTEXT_LEN // page_size + 1))
        first_page = int(rng.integers(0, MAX_CONTEXT_LEN // page_size - num_pages + 1))
        pages = rng.choice(NUM_PAGES, num_pages).astype(np.int32)
        slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS)].astype(np.int32)
        writes.append(TableWrite(slots, first_page, pages))
        for slot in slots:
            for i, page in enumerate(pages):
                start = (first_page + i) * page_size
                indices = page * page_size + np.arange(page_size)
                expected[slot, start : start + page_size] = indices
    StepInputBuilder(table, pool, CPU).apply_memory_writes(plan_of(writes))
    assert np.array_equal(table.req_to_token.numpy(), expected)


def test_a_prefix_may_end_where_the_table_does_whatever_the_page_size_leaves_over() -> None:
    """A context of 2,048 tokens holds 292 pages of seven; whole pages never reach beyond it."""
    table = ReqToTokenPool(2, MAX_CONTEXT_LEN, CPU)
    pages = np.arange(1, 293, dtype=np.int32)
    write = TableWrite(np.array([1], dtype=np.int32), 0, pages)
    pool = PagesOnly(7)
    StepInputBuilder(table, pool, CPU).apply_memory_writes(plan_of([write]))
    assert table.req_to_token[1, : 292 * 7].tolist() == list(range(7, 293 * 7))
    assert table.req_to_token[1, 292 * 7 :].count_nonzero() == 0
