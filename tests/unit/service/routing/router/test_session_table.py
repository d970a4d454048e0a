"""Sessions: homes are bounded and forgotten; unknown ones fall alike everywhere and move little."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from service.routing.session import NO_SESSION, make_session_key
from service.routing.session_table import SessionTable, rendezvous


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def table(max_sessions=3, idle_s=10.0):
    clock = Clock()
    return SessionTable(max_sessions, idle_s, clock), clock


def key(number):
    return make_session_key("caller", "", f"session {number}")


def test_a_session_is_found_where_it_was_settled_last():
    homes, _ = table()
    assert homes.find(key(1)) == ""
    homes.settle(key(1), "a")
    homes.settle(key(1), "b")
    assert (homes.find(key(1)), len(homes)) == ("b", 1)


def test_silent_sessions_are_forgotten_and_busy_ones_are_not():
    homes, clock = table()
    homes.settle(key(1), "a")
    homes.settle(key(2), "b")
    clock.now_s = 8.0
    homes.settle(key(1), "a")
    clock.now_s = 12.0
    assert (homes.find(key(1)), homes.find(key(2)), len(homes)) == ("a", "", 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=60))
def test_the_most_recently_used_sessions_are_kept(history):
    homes, _ = table()
    recent: dict[int, str] = {}
    for number, replica_id in history:
        homes.settle(key(number), replica_id)
        recent.pop(number, None)
        recent[number] = replica_id
    kept = dict(list(recent.items())[-3:])
    assert {n: homes.find(key(n)) for n in range(10)} == {n: kept.get(n, "") for n in range(10)}
    assert len(homes) == len(kept)


replicas = st.lists(st.uuids().map(str), min_size=2, max_size=8, unique=True)


@given(replicas, st.integers(0, 1000))
def test_the_home_does_not_depend_on_the_order_and_moves_only_when_it_is_lost(names, number):
    home = rendezvous(key(number), names)
    assert home in names
    assert rendezvous(key(number), reversed(names)) == home
    for lost in names:
        remaining = [name for name in names if name != lost]
        moved = rendezvous(key(number), remaining)
        assert moved in remaining if lost == home else moved == home


def test_sessions_spread_evenly():
    counts = Counter(rendezvous(key(number), "abcd") for number in range(4000))
    assert all(850 < counts[name] < 1150 for name in "abcd")


parts = st.text(alphabet="ab:", max_size=4)


@given(st.tuples(parts, parts, parts), st.tuples(parts, parts, parts))
def test_keys_are_equal_only_for_the_same_caller_salt_and_name(first, second):
    if first[2] and second[2]:
        assert (make_session_key(*first) == make_session_key(*second)) == (first == second)
    else:
        assert NO_SESSION in (make_session_key(*first), make_session_key(*second))
