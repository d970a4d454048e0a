"""Turns: every Nth replay of each size, counted size by size."""

import pytest

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.graphs.measured_turns import MeasuredTurns


def test_every_nth_replay_of_each_size_is_measured() -> None:
    turns = MeasuredTurns(3)
    assert [turns.take(8) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [turns.take(1) for _ in range(3)] == [False, False, True]


def test_an_interval_of_zero_measures_nothing_and_wants_nothing() -> None:
    turns = MeasuredTurns(0)
    assert not any(turns.take(4) for _ in range(1000))
    assert turns.most_replayed([4]) is None


def test_the_most_replayed_size_is_wanted_once_it_came_to_a_turn() -> None:
    turns = MeasuredTurns(3)
    for size in (4, 4, 8, 8):
        turns.take(size)
    assert turns.most_replayed([4, 8]) is None
    for size in (4, 8, 8):
        turns.take(size)
    assert turns.most_replayed([4, 8]) == 8
    assert turns.most_replayed([4]) == 4
    assert turns.most_replayed([]) is None


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_timing_interval_steps"):
        EngineConfig(attention_timing_interval_steps=-1)
