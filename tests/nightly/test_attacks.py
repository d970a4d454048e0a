"""Every attack on a service with keys and on one without, for some seconds: nobody else fails.

Times are not judged here: machines that run this are shared. `python -m benchmarks.attacks` does.
"""

import argparse

import pytest

from benchmarks.attacks.__main__ import MAX_DRAIN_S, MAX_GROWTH_MIB, run
from benchmarks.attacks.attackers import ATTACKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("is_open", [False, True], ids=["keys", "open"])
def test_every_attack_reaches_the_service_and_nobody_fails(is_open):
    arguments = argparse.Namespace(seconds=4.0, attack=None, rate=10.0, open=is_open)
    outcomes, drain_s = run(arguments)
    assert [one.name for one in outcomes] == list(ATTACKS)
    for one in outcomes:
        assert one.strike.num_streams > 0, one
        assert one.failures == []
        assert one.growth_mib < MAX_GROWTH_MIB
    cut_off = {one.name for one in outcomes if one.strike.num_cut}
    assert cut_off >= {"trailers", "tiny-chunks", "pipelines"}
    assert drain_s < MAX_DRAIN_S
