"""Four-bit weights as they are kept: what goes together, and which sizes products have."""

import pytest
import torch

from tests.fakes.int4_weights import int4_weight, kept_of
from workers.layers.kept.int4 import FLOAT_HEADER, HALF_HEADER, SCALES_HEADER, Int4Groups


@pytest.mark.parametrize("has_half_scales", [True, False])
@pytest.mark.parametrize("columns", [128, 384, 512])
@pytest.mark.parametrize("group_size", [64, 128])
def test_it_is_the_weight(columns, group_size, has_half_scales) -> None:
    weight = int4_weight(24, columns, group_size, has_half_scales=has_half_scales)
    kept = kept_of(weight)
    assert torch.equal(kept.dequantised(), weight.dequantised())
    assert (kept.out_features, kept.in_features) == (24, columns)
    assert kept.headers.shape[-1] == (HALF_HEADER if has_half_scales else FLOAT_HEADER)
    unread = Int4Groups.unread(24, columns, columns // group_size, has_order=False)
    assert (unread.words.shape, unread.turn) == (kept.words.shape, kept.turn)
    if has_half_scales:
        assert unread.headers.shape == kept.headers.shape


def test_symmetric_weights_have_no_zeros() -> None:
    weight = int4_weight(16, 512, 128, is_symmetric=True)
    kept = kept_of(weight)
    assert kept.headers.shape == (2, 2, 8, SCALES_HEADER)
    assert torch.equal(kept.dequantised(), weight.dequantised())
    weight.zeros[11, 2] = 7
    assert kept_of(weight).headers.shape[-1] == HALF_HEADER
    assert torch.equal(kept_of(weight).dequantised(), weight.dequantised())


def test_what_a_load_takes_lies_together() -> None:
    """Of eight rows the first 128 columns, then the next: row 3's second 128 begin behind all of
    the first ones and three rows of the second."""
    values = torch.zeros(16, 512, dtype=torch.int32)
    values[11, 128:256] = 5
    scales, zeros = torch.ones(16, 4), torch.zeros(16, 4, dtype=torch.int32)
    kept = Int4Groups.of(values, scales, zeros, torch.arange(512) // 128)
    places = kept.words[1].nonzero().flatten().tolist()
    # A turn's words have a pair of each of its quarters: columns from 128 on are two of them.
    first, second = 3 * 16, (8 + 3) * 16
    assert places == [*range(first, first + 16), *range(second, second + 16)]
    assert not kept.words[0].any()


def test_pieces_with_other_scales_and_groups_are_joined() -> None:
    weights = [
        int4_weight(8, 512, 128),
        int4_weight(16, 512, 256, has_half_scales=False),
        int4_weight(8, 512, 512),
    ]
    joined = Int4Groups.joined([kept_of(one) for one in weights])
    assert torch.equal(joined.dequantised(), torch.cat([one.dequantised() for one in weights]))
    alike = Int4Groups.joined([kept_of(one) for one in (weights[0], weights[2])])
    assert alike.headers.shape[-1] == HALF_HEADER
    short = int4_weight(8, 512, 128, is_symmetric=True)
    both = Int4Groups.joined([kept_of(one) for one in (short, weights[0])])
    assert both.headers.shape[-1] == HALF_HEADER
    assert torch.equal(both.dequantised()[:8], short.dequantised())
    unread = [Int4Groups.unread(8, 512, 4, False, is_symmetric=one) for one in (True, False)]
    assert Int4Groups.joined(unread).headers.shape == both.headers.shape
    shorts = Int4Groups.joined([kept_of(short), kept_of(short)])
    assert shorts.headers.shape[-1] == SCALES_HEADER


def test_other_turns_do_not_go_together() -> None:
    pieces = [kept_of(int4_weight(8, 512, group_size)) for group_size in (64, 128)]
    assert [one.turn for one in pieces] == [128, 256]
    assert Int4Groups.joined(pieces) is None


@pytest.mark.parametrize(("rows", "columns", "group_size"), [(12, 512, 128), (8, 512, 32)])
def test_products_have_no_such_sizes(rows, columns, group_size) -> None:
    assert kept_of(int4_weight(rows, columns, group_size)) is None
    assert Int4Groups.unread(rows, columns, columns // group_size, has_order=False) is None


@pytest.mark.parametrize("scale", [torch.inf, torch.nan, 5e37])
def test_scales_that_products_cannot_take_are_found(scale) -> None:
    weight = int4_weight(8, 256, 128)
    assert kept_of(weight).is_finite()
    weight.scales[3, 1] = scale
    assert not kept_of(weight).is_finite()
