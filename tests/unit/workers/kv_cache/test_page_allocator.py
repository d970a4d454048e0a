"""PageAllocator: every page is out once or free once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.errors import ConfigError, IntegrityError
from workers.kv_cache.page_allocator import PageAllocator


def test_all_pages_but_the_reserved_one_are_handed_out_once():
    allocator = PageAllocator(num_pages=6, page_size=4)
    pages = allocator.allocate(5)
    assert pages is not None
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert allocator.num_free_pages == 0


def test_a_request_for_too_many_pages_changes_nothing():
    allocator = PageAllocator(num_pages=4, page_size=1)
    assert allocator.allocate(4) is None
    assert allocator.num_free_pages == 3
    allocator.check_integrity()


def test_zero_pages_are_always_to_be_had():
    allocator = PageAllocator(num_pages=2, page_size=1)
    allocator.allocate(1)
    pages = allocator.allocate(0)
    assert pages is not None
    assert len(pages) == 0
    allocator.free(pages)


def test_what_was_handed_out_does_not_change_when_pages_come_back():
    allocator = PageAllocator(num_pages=8, page_size=1)
    first = allocator.allocate(3)
    second = allocator.allocate(3)
    assert first is not None
    assert second is not None
    kept = second.copy()
    allocator.free(first)
    assert second.tolist() == kept.tolist()


@pytest.mark.parametrize("pages", [[0], [-1], [9], [1, 0]])
def test_foreign_pages_are_refused(pages: list[int]):
    allocator = PageAllocator(num_pages=9, page_size=1)
    allocator.allocate(8)
    with pytest.raises(IntegrityError, match="cannot free page"):
        allocator.free(np.array(pages, dtype=np.int32))
    assert allocator.num_free_pages == 0


def test_a_double_free_is_detected():
    allocator = PageAllocator(num_pages=9, page_size=1)
    pages = allocator.allocate(4)
    assert pages is not None
    allocator.free(pages[:2])
    with pytest.raises(IntegrityError, match="double free"):
        allocator.free(pages[1:])
    allocator.check_integrity()
    assert allocator.num_free_pages == 6


def test_a_page_twice_in_one_free_is_detected():
    allocator = PageAllocator(num_pages=9, page_size=1)
    pages = allocator.allocate(4)
    assert pages is not None
    with pytest.raises(IntegrityError, match="occur twice"):
        allocator.free(pages[[0, 1, 0]])
    assert allocator.num_free_pages == 4


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (8, 0)])
def test_impossible_sizes_are_refused(num_pages: int, page_size: int):
    with pytest.raises(ConfigError, match="must be at least"):
        PageAllocator(num_pages, page_size)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.lists(st.integers(-8, 12), max_size=60))
def test_any_order_of_allocating_and_freeing_keeps_the_books(num_pages: int, moves: list[int]):
    allocator = PageAllocator(num_pages, page_size=1)
    held: list[int] = []
    for move in moves:
        if move >= 0:
            pages = allocator.allocate(move)
            assert (pages is None) == (move > num_pages - 1 - len(held))
            held += [] if pages is None else pages.tolist()
        else:
            back, held = held[:-move], held[-move:]
            allocator.free(np.array(back, dtype=np.int32))
        allocator.check_integrity()
        free = allocator.free_pages().tolist()
        assert sorted(held + free) == list(range(1, num_pages))
