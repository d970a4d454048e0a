"""What the token-way benchmark counts: tokens, not the outputs that they arrive in."""

from array import array

import pytest

from benchmarks.token_way import Load, arrivals_of


def test_every_token_has_its_own_latency():
    produced = [array("d", [1.0, 2.0, 3.0])]
    arrived = [array("d", [1.5, 3.5, 3.5])]  # the last two came in one output
    arrivals = arrivals_of(Load(1, 3, 1.0), produced, arrived)
    assert arrivals.latencies_s == pytest.approx([0.5, 1.5, 0.5])
    assert (arrivals.num_tokens, arrivals.elapsed_s) == (3, 2.5)


def test_the_first_second_of_a_long_run_does_not_count():
    stamps = [array("d", [10.0, 10.5, 11.0, 12.5])]
    arrivals = arrivals_of(Load(1, 4, 1.0), stamps, stamps)
    assert (arrivals.num_tokens, arrivals.elapsed_s) == (2, 1.5)


def test_outputs_are_not_taken_for_tokens():
    produced = [array("d", [1.0, 2.0, 3.0])]
    with pytest.raises(ValueError, match="a stream of 3 tokens has 2"):
        arrivals_of(Load(1, 3, 1.0), produced, [array("d", [1.5, 3.5])])
