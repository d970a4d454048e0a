"""Turns over a pretended device: it begins a run when its wait is over, whether or not the host has
launched all of it by then."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from attention.tuning.turns import MAX_LEAD_S, MIN_LEAD_S, Turns, take_turns

US = 1e-6
EIGHT_TURNS = Turns(least=8, most=20, seconds=0.0)


@dataclass(frozen=True)
class Timed:
    host_s: float
    is_hidden: bool
    device_s: float

    def seconds(self):
        return self.device_s


@dataclass
class Device:
    """host_s, device_s: of a run, by its name; a run is its name here. hiccups: numbers of launches
    that take the host ten times as long. syncs: runs that wait for the device within themselves."""

    host_s: dict
    device_s: dict
    hiccups: tuple = ()
    syncs: tuple = ()
    launched: list = field(default_factory=list)
    is_idle: bool = True

    def launch(self, run, lead_s):
        host_s = self.host_s[run] * (10 if len(self.launched) in self.hiccups else 1)
        is_hidden = run not in self.syncs and host_s <= lead_s
        self.launched.append((run, lead_s))
        self.is_idle = False
        whole_s = self.device_s[run]
        return Timed(host_s, is_hidden, whole_s if is_hidden else max(whole_s, host_s))

    def wait(self):
        self.is_idle = True

    def times(self, turns=EIGHT_TURNS):
        return take_turns({run: run for run in self.host_s}, self.launch, self.wait, turns)


def test_a_run_that_the_host_launches_slowly_is_told_by_its_device():
    """As prompts of few tokens: 16 layers are launched in 1,100 us, and attend in 300."""
    device = Device({"a": 1100 * US, "b": 50 * US}, {"a": 300 * US, "b": 290 * US})
    times = device.times()
    assert set(times["a"]) == {300 * US}
    assert set(times["b"]) == {290 * US}
    leads = {run: {lead for one, lead in device.launched[-16:] if one == run} for run in "ab"}
    assert leads["b"] == {MIN_LEAD_S}
    (lead_s,) = leads["a"]
    assert 1100 * US < lead_s < 2000 * US


def test_the_lead_is_found_while_the_device_has_nothing_else_to_do():
    device = Device({"a": 900 * US, "b": 900 * US}, {"a": US, "b": US})
    seen = []

    def launch(run, lead_s):
        seen.append(device.is_idle)
        return device.launch(run, lead_s)

    take_turns({"a": "a", "b": "b"}, launch, device.wait, Turns(least=2, most=2))
    assert seen[:4] == [True] * 4


def test_a_turn_in_which_the_host_was_held_up_does_not_count():
    hiccups = tuple(range(4, 12))
    device = Device({"a": 60 * US, "b": 60 * US}, {"a": 90 * US, "b": 80 * US}, hiccups)
    times = device.times()
    assert set(times["a"]) == {90 * US}
    assert set(times["b"]) == {80 * US}
    assert len(times["a"]) + len(times["b"]) == 16 - len(hiccups)


def test_a_run_that_waits_for_the_device_counts_as_it_is():
    device = Device({"a": 400 * US, "b": 50 * US}, {"a": 200 * US, "b": 300 * US}, syncs=("a",))
    times = device.times()
    assert times["a"] == [400 * US] * 8
    assert max(lead for _, lead in device.launched) == MAX_LEAD_S
    assert [run for run, _ in device.launched].count("a") < 8 + 9, "leads are found in few launches"


def test_nobody_always_comes_behind_the_same_one():
    names = "abcde"
    device = Device(dict.fromkeys(names, US), dict.fromkeys(names, 100 * US))
    device.times(Turns(least=40, most=40))
    order = [run for run, _ in device.launched[-200:]]
    assert Counter(order) == dict.fromkeys(names, 40)
    before = Counter(pairwise(order))
    for name in names:
        behind = [before[other, name] for other in names if other != name]
        assert max(behind) < 20, before


def test_who_is_three_times_slower_has_one_turn_and_costs_the_others_none():
    device = Device(
        {"slow": US, "a": US, "b": US}, {"slow": 4000 * US, "a": 1000 * US, "b": 1250 * US}
    )
    times = device.times(Turns(least=2, most=50, seconds=0.02))
    assert {name: len(own) for name, own in times.items()} == {"slow": 1, "a": 16, "b": 16}


@pytest.mark.parametrize(
    ("device_s", "expected"), [(1.0, 3), (0.02, 3), (0.015, 7), (1e-3, 20), (1e-5, 21)]
)
def test_as_many_turns_as_the_time_is_for(device_s, expected):
    times = Device({"a": US}, {"a": device_s}).times(Turns(least=7, most=21, seconds=0.02))
    assert len(times["a"]) == expected
