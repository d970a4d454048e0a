"""Points: what is measured lies within an engine's limits, and a step finds its like."""

import numpy as np
import pytest

from attention.forward_batch import ForwardMode
from attention.timing import AttentionPhase
from attention.tuning.points import (
    StepLimits,
    StepPoint,
    point_of,
    points_between,
    points_to_measure,
)
from tests.unit.attention.tuning.doubles import decode, extend

LIMITS = StepLimits(256, 8192, 32768, 1 << 18)


def int32(*values):
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("limits", [LIMITS, StepLimits(3, 100, 500, 1 << 18, has_verify=True)])
def test_no_point_exceeds_what_a_step_may_have(limits):
    points = points_to_measure(limits)
    assert len(set(points)) == len(points)
    for point in points:
        seq_lens, new = point.lengths()
        assert len(seq_lens) == len(new) == point.rows <= limits.max_rows
        assert new.min() >= 1
        assert (seq_lens >= new).all()
        assert new.sum() <= limits.max_step_tokens
        assert seq_lens.max() <= limits.max_context_len
        assert seq_lens.sum() <= limits.max_keys
    phases = {point.phase for point in points}
    assert (AttentionPhase.VERIFY in phases) == limits.has_verify


def test_an_engines_own_limits_are_measured_too():
    points = points_to_measure(StepLimits(100, 3000, 9000, 1 << 18))
    decodes = [point for point in points if point.phase is AttentionPhase.DECODE]
    assert max(point.rows for point in decodes) == 100
    assert max(point.prefix_tokens for point in decodes) == 8999
    assert any(point.new_tokens == 3000 for point in points)


def test_phases_take_turns_and_each_begins_with_a_coarse_grid():
    first = points_to_measure(LIMITS)[:16]
    assert [point.phase for point in first[:4]] == ["decode", "extend"] * 2
    decodes = [point for point in first if point.phase is AttentionPhase.DECODE]
    rows = sorted({point.rows for point in points_to_measure(LIMITS)})
    assert len({point.rows for point in decodes}) >= 4
    assert {point.rows for point in decodes} <= set(rows[::2])


def test_decode_is_measured_at_no_worst_case_of_kernels_that_cut_keys_at_round_places():
    limits = StepLimits(256, 8192, 1 << 20, 1 << 18)
    for point in points_to_measure(limits):
        if point.phase is AttentionPhase.DECODE:
            assert 16 <= (point.prefix_tokens + point.new_tokens) % 64 <= 48


@pytest.mark.parametrize("point", points_to_measure(LIMITS), ids=str)
def test_a_measured_step_is_its_own_point(point):
    mode = ForwardMode.DECODE if point.phase is AttentionPhase.DECODE else ForwardMode.EXTEND
    found = point_of(mode, *point.lengths())
    assert (found.phase, found.rows, found.is_uneven) == (point.phase, point.rows, point.is_uneven)
    assert found.new_tokens == point.new_tokens
    tolerance = 0.15 if point.is_uneven else 0.0
    assert abs(found.prefix_tokens - point.prefix_tokens) <= tolerance * point.prefix_tokens + 1


def test_unlike_lengths_count_where_rows_are_many():
    even, uneven = int32(*[100] * 16), int32(*[50] * 15, 5000)
    ones = np.ones(16, dtype=np.int32)
    assert point_of(ForwardMode.DECODE, even, ones) == decode(16, 99)
    assert point_of(ForwardMode.DECODE, uneven, ones).is_uneven
    assert not point_of(ForwardMode.DECODE, uneven[-4:], ones[:4]).is_uneven


def test_a_prompt_beside_decoding_rows_is_a_kind_of_its_own():
    new = int32(*[1] * 9, 300)
    found = point_of(ForwardMode.EXTEND, int32(*[200] * 9, 300), new)
    assert found == extend(10, 31, 179, is_uneven=True)


def test_a_step_without_rows_has_a_point():
    nothing = int32()
    assert point_of(ForwardMode.IDLE, nothing, nothing) == extend(1, 1)


def test_points_read_as_what_they_are():
    assert str(decode(64, 4095)) == "decode 64 x 4096"
    assert str(decode(64, 4095, True)) == "decode 64 x unlike lengths, mean 4096"
    assert str(extend(8, 256, 4096)) == "extend 8 x 256 on 4096"
    assert "beside decoding rows" in str(StepPoint(AttentionPhase.EXTEND, 64, 8, 1024, True))


def test_between_points_lie_those_of_means_of_their_axes():
    found = list(points_between([decode(1, 99), decode(4, 399), decode(8, 99, True)]))
    assert len(found) == len(set(found))
    assert {(one.rows, one.prefix_tokens) for one in found if not one.is_uneven} == {
        (rows, keys) for rows in (1, 2, 4) for keys in (99, 199, 399)
    }
    assert [one for one in found if one.is_uneven] == [decode(8, 99, True)]


def test_a_context_that_ends_at_a_measured_length_has_no_second_one_there():
    lengths = {one.prefix_tokens for one in points_to_measure(LIMITS) if one.new_tokens == 1}
    assert sorted(lengths)[-2:] == [16352, 32736]
