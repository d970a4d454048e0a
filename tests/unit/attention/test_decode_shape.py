"""What decode kernels are compiled for follows from the heads, and covers what it must."""

import pytest

from attention.kernels.decode_shape import DecodeGeometry, measured_tuning


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 16, 32])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128, 256])
def test_tiles_hold_the_group_and_blocks_lie_in_pages_where_the_shape_says_so(
    head_dim, group, page_size
):
    geometry = DecodeGeometry(2, group, head_dim, page_size)
    tuning = measured_tuning(geometry, 1)
    shape = geometry.shape(
        tuning, has_window=True, has_cap=False, has_sinks=True, is_dependent=True
    )
    assert shape.tile_rows >= max(16, shape.tile_group) >= shape.tile_group >= group
    assert shape.tile_dim >= head_dim
    assert shape.partial_size == group * (head_dim + 2)
    assert shape.has_whole_blocks == (page_size % shape.block_keys == 0)
    for size in (*shape[9:13], shape.block_keys):
        assert size & (size - 1) == 0


def test_the_front_covers_whole_heads_of_the_usual_sizes_only():
    assert DecodeGeometry(8, 4, 128, 128).can_fuse_projection
    assert DecodeGeometry(8, 16, 64, 1).can_fuse_projection
    assert not DecodeGeometry(8, 4, 96, 128).can_fuse_projection
    assert not DecodeGeometry(1, 32, 128, 128).can_fuse_projection


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 256, 512])
def test_tuning_fits_the_kernel(head_dim, num_rows):
    tuning = measured_tuning(DecodeGeometry(8, 4, head_dim, 128), num_rows)
    operand_bytes = 2 * 2 * tuning.block_keys * head_dim
    assert tuning.num_stages * operand_bytes <= 224 << 10
    assert tuning.min_chunk_tokens >= tuning.block_keys
    assert 0 <= tuning.slack_eighths <= 8
