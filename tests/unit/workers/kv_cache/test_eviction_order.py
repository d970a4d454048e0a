"""Which prefixes outlive others in the radix cache, and what it says of those that went."""

from tests.unit.workers.kv_cache.caches import insert, make_cache, match
from workers.kv_cache.eviction_order import LIFETIME_RATIO
from workers.kv_cache.radix_cache import RadixCache


def shared_then_unshared(num_unshared: int) -> RadixCache:
    """Page 7 leads on to 8 and to 9; then num_unshared pages from 100 on, used once each."""
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    insert(cache, [1, 2, 5, 6], [7, 9])
    assert cache.evict(2)[0].tolist() == [8, 9]
    for number in range(num_unshared):
        insert(cache, [50 + number, 0], [100 + number])
    return cache


def test_what_requests_went_on_from_in_different_ways_outlives_what_was_used_later():
    assert shared_then_unshared(3).evict(3)[0].tolist() == [100, 101, 102]


def test_a_shared_prefix_that_fell_out_of_use_goes_before_what_is_recent():
    cache = shared_then_unshared(1)
    for number in range(LIFETIME_RATIO * 10):
        cache.evict(1)
        insert(cache, [200 + number, 0], [300 + number])
    assert 7 not in cache.all_pages()


def test_a_conversation_is_not_shared_however_many_turns_it_has():
    cache = make_cache()
    for num_pages in range(1, 6):
        tokens = list(range(2 * num_pages))
        match(cache, tokens)
        insert(cache, tokens, list(range(1, num_pages + 1)))
    insert(cache, [90, 91], [90])
    assert cache.evict(5)[0].tolist() == [5, 4, 3, 2, 1]
    cache.check_integrity([])


def test_a_prefix_whose_first_continuation_was_evicted_is_shared_with_the_next_one():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    assert cache.evict(1)[0].tolist() == [8]
    insert(cache, [1, 2, 5, 6], [7, 9])
    assert cache.evict(1)[0].tolist() == [9]
    insert(cache, [60, 61], [60])
    assert cache.evict(1)[0].tolist() == [60]


def instruction_with_questions(num_questions: int, num_returns: int) -> RadixCache:
    """Page 7 leads on to as many pages from 100 on; the first question is asked again."""
    cache = make_cache()
    for number in range(num_questions):
        insert(cache, [1, 2, 50 + number, 0], [7, 100 + number])
    for _ in range(num_returns):
        cache.count_return(match(cache, [1, 2, 50, 0, 0, 0]).node)
    return cache


def test_continuations_of_what_never_had_one_come_back_go_before_an_older_text_seen_once():
    cache = instruction_with_questions(LIFETIME_RATIO + 1, num_returns=0)
    cache.evict(LIFETIME_RATIO + 1)
    insert(cache, [90, 91], [90])
    for number in range(5):
        insert(cache, [1, 2, 80 + number, 0], [7, 200 + number])
    assert cache.evict(5)[0].tolist() == [200, 201, 202, 203, 204]
    cache.check_integrity([])


def test_what_follows_a_question_is_as_barren_as_the_question():
    """Leaves two edges below the instruction: each question was answered, then went on."""
    cache = instruction_with_questions(LIFETIME_RATIO + 1, num_returns=0)
    insert(cache, [90, 91], [90])
    for number in range(LIFETIME_RATIO + 1):
        insert(cache, [1, 2, 50 + number, 0, 3, 4], [7, 100 + number, 300 + number])
    assert cache.evict(1)[0].tolist() == [300], "though the other text is older"


def test_leaves_that_have_become_barren_since_they_were_queued_are_found():
    cache = instruction_with_questions(LIFETIME_RATIO, num_returns=0)
    cache.lock(insert(cache, [1, 2, 80, 0], [7, 200]).node)
    assert len(cache.evict(LIFETIME_RATIO)[0]) == LIFETIME_RATIO


def test_an_old_text_seen_once_does_go_before_barren_ones_just_written():
    cache = instruction_with_questions(LIFETIME_RATIO + 1, num_returns=0)
    insert(cache, [90, 91], [90])
    for number in range(10 * LIFETIME_RATIO):
        cache.evict(1)
        insert(cache, [1, 2, 80 + number, 0], [7, 200 + number])
    assert 90 not in cache.all_pages()


def test_looking_for_a_prefix_is_no_return_to_it():
    """Who waits for room looks at every step, and goes on from there once."""
    cache = instruction_with_questions(LIFETIME_RATIO + 1, num_returns=0)
    for _ in range(50):
        match(cache, [1, 2, 50, 0, 0, 0])
    assert match(cache, [1, 2]).node.num_returns == 0


def test_a_split_keeps_what_is_known_of_the_way():
    """An instruction of two pages that is shared; then a text comes with its first page only."""
    cache = make_cache()
    for number in range(3):
        cache.count_return(insert(cache, [1, 2, 3, 4, 50 + number, 0], [7, 8, 100 + number]).node)
    below = match(cache, [1, 2, 3, 4]).node
    accessed = below.last_access
    upper = below.split(1, 2)
    assert (below.num_continuations, below.num_returns) == (3, 2), "the first text made one edge"
    assert (upper.num_continuations, upper.num_returns) == (3, 2)
    assert upper.last_access == accessed
    leaf = make_cache()
    single = insert(leaf, [1, 2, 3, 4], [7, 8]).node
    assert single.split(1, 2).num_continuations == 1


def test_continuations_of_which_enough_come_back_wait_for_their_turn():
    cache = instruction_with_questions(LIFETIME_RATIO + 1, num_returns=1)
    insert(cache, [90, 91], [90])
    assert cache.evict(1)[0].tolist() == [101], "the oldest that was not asked again"
    few = instruction_with_questions(LIFETIME_RATIO, num_returns=0)
    assert few.evict(1)[0].tolist() == [100], "the oldest of too few to tell"


def test_nothing_is_barren_only_because_it_begins_unlike_all_else():
    cache = make_cache()
    for number in range(5 * LIFETIME_RATIO):
        insert(cache, [50 + number, 0], [100 + number])
    instruction = instruction_with_questions(0, 0)
    assert instruction.evict(1)[0].tolist() == []
    assert cache.evict(2)[0].tolist() == [100, 101]


def test_the_horizon_says_what_was_evicted_by_last_use_and_shared_texts_apart():
    cache = shared_then_unshared(3)
    before = cache.eviction_horizon
    cache.evict(1)
    first = cache.eviction_horizon
    cache.evict(1)
    second = cache.eviction_horizon
    assert before.ordinary < first.ordinary < second.ordinary
    assert before.shared == second.shared == -1, "none is gone yet"
    cache.evict(2)
    assert cache.eviction_horizon.shared > -1
    assert make_cache().eviction_horizon == (-1, -1)


def test_the_horizon_never_falls():
    """What was locked while younger texts went is evicted after them."""
    cache = make_cache()
    held = insert(cache, [1, 2], [7]).node
    cache.lock(held)
    insert(cache, [3, 4], [8])
    assert cache.evict(1)[0].tolist() == [8]
    horizon = cache.eviction_horizon
    cache.unlock(held)
    assert cache.evict(1)[0].tolist() == [7]
    assert cache.eviction_horizon == horizon
