"""Which pages a slot has: each transition moves what it says and no more."""

import numpy as np
import pytest

from workers.errors import IntegrityError
from workers.kv_cache.prefix_cache import InsertResult, PrefixMatch
from workers.kv_cache.radix_node import EMPTY, RadixNode
from workers.scheduler.slot_pages import SlotPages


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def node_with(*pages: int) -> RadixNode:
    """A path of one node; with page size 2."""
    keys = np.arange(2 * len(pages), dtype=np.int32)
    return RadixNode(keys, ints(*pages), RadixNode.root(""))


def begun(num_bounded: int = 0) -> SlotPages:
    """Slot 1 has found pages 7 and 8, and has taken 3, 4 and 5."""
    pages = SlotPages(max_slots=2, max_pages_per_request=200, page_size=2, num_bounded=num_bounded)
    held = (ints(0, 28),) * num_bounded
    pages.begin_with_prefix(1, PrefixMatch(ints(7, 8), node_with(7, 8), held))
    pages.grow(1, (ints(3, 4), *(ints(23, 24),) * num_bounded))
    pages.grow_each(np.array([1]), (ints(5), *(ints(25),) * num_bounded))
    pages.check_integrity([1])
    return pages


def counts(pages: SlotPages) -> tuple[list[int], list[int], list[int]]:
    return pages.num_found.tolist(), pages.num_shared.tolist(), pages.num_pages.tolist()


def test_a_slot_begins_with_what_it_found_and_grows() -> None:
    pages = begun()
    assert pages.page_table[1, :5].tolist() == [7, 8, 3, 4, 5]
    assert counts(pages) == ([0, 2], [0, 2], [0, 5])
    assert pages.own_pages(1, 0).tolist() == [3, 4, 5]
    (indices,) = pages.cache_indices(1, 3, 6)
    assert indices.tolist() == [17, 6, 7]
    assert pages.own_indices(1, 0, 3, 6).tolist() == [6, 7]


def test_what_the_cache_takes_is_shared_and_duplicates_are_handed_back() -> None:
    pages, node = begun(), node_with(7, 8, 13, 4)
    (offer,) = pages.offer(1, 4)
    assert offer.tolist() == [7, 8, 3, 4]
    (replaced,) = pages.give_to_cache(1, InsertResult(ints(7, 8, 13, 4), node))
    assert (replaced.pages.tolist(), replaced.first, replaced.entries.tolist()) == ([3], 2, [13])
    assert pages.page_table[1, :5].tolist() == [7, 8, 13, 4, 5]
    assert counts(pages) == ([0, 2], [0, 4], [0, 5])
    assert pages.node_of(1) is node
    pages.check_integrity([1])


def test_a_bounded_account_is_trimmed_from_the_left_and_offers_what_is_its_own() -> None:
    pages = begun(num_bounded=1)
    assert pages.trim(1, 1, 3).tolist() == [23]
    assert pages.bounded[0].page_table[1, :5].tolist() == [0, 28, 0, 24, 25]
    assert pages.own_pages(1, 1).tolist() == [24, 25]
    assert pages.own_indices(1, 1, 0, 8).tolist() == [48, 49]
    assert [one.tolist() for one in pages.offer(1, 4)] == [[7, 8, 3, 4], [0, 0, 0, 24]]
    result = InsertResult(ints(7, 8, 3, 4), node_with(7, 8, 3, 4), (ints(0, 28, 33, 34),))
    main, bounded = pages.give_to_cache(1, result)
    assert (len(main.pages), bounded.pages.tolist(), bounded.first) == (0, [24], 3)
    assert bounded.entries.tolist() == [34]
    assert pages.own_pages(1, 1).tolist() == [25]


def test_a_released_slot_has_nothing_and_hands_back_what_the_cache_did_not_take() -> None:
    pages = begun(num_bounded=1)
    result = InsertResult(ints(7, 8, 13, 4), node_with(7, 8, 13, 4), (ints(0, 28, 23, 34),))
    assert [one.tolist() for one in pages.release(1, result)] == [[3, 5], [24, 25]]
    pages.check_integrity([])
    assert counts(pages) == ([0, 0], [0, 0], [0, 0])
    assert not pages.bounded[0].page_table.any()
    with pytest.raises(IntegrityError, match="slot 1 has no prefix node"):
        pages.node_of(1)
    assert [one.tolist() for one in begun(1).release(1, None)] == [[3, 4, 5], [23, 24, 25]]


def test_the_cache_never_has_less_than_it_shared() -> None:
    with pytest.raises(IntegrityError, match="slot 1 shared 2 pages, and now 1"):
        begun().give_to_cache(1, InsertResult(ints(7), node_with(7)))
    with pytest.raises(IntegrityError, match="slot 1 shared 2 pages, and now 0"):
        begun().give_to_cache(1, InsertResult(EMPTY, RadixNode.root("")))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_shared", 3, "not its node's path"),
        ("num_shared", 6, "found, shares and has"),
        ("num_found", 3, "found, shares and has"),
        ("num_pages", 6, "lacks pages of account 0"),
    ],
)
def test_counts_that_do_not_fit_are_found_out(name: str, value: int, reason: str) -> None:
    pages = begun()
    getattr(pages, name)[1] = value
    with pytest.raises(IntegrityError, match=reason):
        pages.check_integrity([1])


def test_what_is_left_in_a_free_slot_is_found_out() -> None:
    with pytest.raises(IntegrityError, match="free slot 1 has pages left"):
        begun().check_integrity([])


def test_a_wide_request_widens_the_table_up_to_the_longest_one_and_keeps_what_is_in_it() -> None:
    pages = SlotPages(max_slots=2, max_pages_per_request=200, page_size=2)
    assert pages.page_table.shape == (2, 64)
    pages.grow(1, (np.arange(1, 61, dtype=np.int32),))
    pages.grow(1, (np.arange(61, 81, dtype=np.int32),))
    assert pages.page_table.shape == (2, 128)
    pages.grow(1, (np.arange(81, 151, dtype=np.int32),))
    assert pages.page_table.shape == (2, 200), "no more than a request may have"
    assert pages.page_table[1, :150].tolist() == list(range(1, 151))
    assert pages.num_pages.tolist() == [0, 150]
    assert not pages.page_table[0].any()
    with pytest.raises(IntegrityError, match="201 pages for one request of 200"):
        pages.grow(1, (np.arange(51, dtype=np.int32),))
