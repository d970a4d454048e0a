"""Silence of a peer is what was looked at, not what was slept through."""

import pytest

from service.channel.silence import Silence


def test_silence_is_the_time_since_the_peer_was_heard():
    silence = Silence(look_interval_s=1.0, now_s=0.0)
    assert [silence.look(now_s) for now_s in (1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0]
    silence.on_heard(3.75)
    assert silence.look(4.0) == 0.25
    assert silence.look(5.0) == 1.25


@pytest.mark.parametrize("stall_s", [5.0, 5000.0])
def test_a_stall_of_our_own_counts_as_two_looks(stall_s):
    silence = Silence(look_interval_s=1.0, now_s=0.0)
    silence.look(1.0)
    assert silence.look(1.0 + stall_s) == 3.0
    assert silence.look(2.0 + stall_s) == 4.0


def test_a_peer_that_is_dead_is_found_however_late_we_look():
    silence = Silence(look_interval_s=1.0, now_s=0.0)
    assert [silence.look(10.0 * turn) for turn in range(1, 5)] == [2.0, 4.0, 6.0, 8.0]


def test_two_looks_are_as_long_as_looks_are():
    silence = Silence(look_interval_s=0.25, now_s=0.0)
    assert silence.look(100.0) == 0.5
