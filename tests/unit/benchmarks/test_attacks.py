"""The attacks reach the service, the honest client is measured, and each broken promise is told."""

import argparse
import dataclasses

import pytest

from benchmarks.attacks.__main__ import MAX_DRAIN_S, MAX_GROWTH_MIB, Outcome, run
from benchmarks.attacks.attackers import Strike
from benchmarks.attacks.honest import Experience
from benchmarks.attacks.target import Ports


@pytest.mark.nightly
def test_attacks_reach_the_service_and_nobody_fails():
    names = ["trailers", "slow-heads", "watches"]
    outcomes, drain_s = run(argparse.Namespace(seconds=1.0, attack=names, rate=10.0, open=False))
    assert [one.name for one in outcomes] == names
    for one in outcomes:
        assert one.strike.num_streams > 0, one
        assert one.failures == []
        assert one.quiet.keys() == one.attacked.keys() == {"http", "grpc"}
        assert all(len(seen.ttft_s) > 3 for seen in (*one.quiet.values(), *one.attacked.values()))
        assert one.growth_mib < MAX_GROWTH_MIB
    trailers, slow_heads, _ = (one.strike.num_cut for one in outcomes)
    # What sends too much is cut off at once; what is slow has its time.
    assert trailers > 0
    assert slow_heads == 0
    assert drain_s < MAX_DRAIN_S


def test_the_verdict_tells_every_broken_promise():
    quiet = Experience([0.010] * 99 + [0.020])
    calm = Experience([0.012] * 200)
    both = {"http": quiet, "grpc": quiet}
    good = Outcome("one", both, {"http": calm, "grpc": calm}, 5.0, Strike(Ports(1, 2, 3)))
    assert good.holds
    for broken in (
        {"growth_mib": MAX_GROWTH_MIB + 0.1},
        {"attacked": {"http": calm, "grpc": Experience([0.012] * 190 + [0.041] * 10)}},
        {"attacked": {"http": Experience([0.012] * 200, ["cut off"]), "grpc": calm}},
        {"attacked": {"http": calm, "grpc": Experience([], [])}},
    ):
        assert not dataclasses.replace(good, **broken).holds, broken


def test_percentiles_are_of_what_was_answered():
    experience = Experience([i / 1000 for i in range(100)])
    assert experience.percentile_ms(50) == pytest.approx(50)
    assert experience.percentile_ms(99) == pytest.approx(99)
