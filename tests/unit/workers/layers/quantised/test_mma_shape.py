"""Which columns the warps of a tensor core product with four-bit weights have."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from benchmarks.h200.product_candidates import one_row_worth_trying
from workers.layers.kept.int4 import Int4Groups
from workers.layers.quantised.int4_mma import int4_mma, mma_shape
from workers.layers.quantised.skinny_shape import MmaTiles, SkinnyShape

TILES = [one for one in one_row_worth_trying("int4") if isinstance(one, MmaTiles)]
SIZES = [(6144, 4096), (28672, 4096), (4096, 14336), (3584, 18944), (1024, 384), (40, 128)]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_warps_of_all_programs_have_each_column_once(tiles, rows, columns) -> None:
    kept = Int4Groups.unread(rows, columns, columns // 128, has_order=False)
    for can_split in (False, True):
        shape = tiles.of(rows, columns, kept.turn, 1, can_split)
        made = mma_shape(kept, shape, is_gated=not can_split)
        assert made.warps == shape.num_warps
        assert shape.num_splits * made.warps * made.steps * made.turn == columns
        assert 1 <= made.depth <= min(made.steps, tiles.num_stages)
        assert can_split or shape.num_splits == 1


def test_turns_are_shared_out_to_batches_of_nearly_one_size() -> None:
    kept = Int4Groups.unread(4096, 14336, 112, has_order=False)
    depths = []
    for held in (4, 7, 14):
        tiles = MmaTiles(16, 1, 1024, min_programs=1, num_stages=held, num_warps=4)
        shape = tiles.of(4096, 14336, kept.turn, 1, can_split=True)
        depths.append(mma_shape(kept, shape, is_gated=False).depth)
    assert depths == [4, 7, 14]


def test_what_is_loaded_by_sixteen_bytes_begins_there() -> None:
    kept = Int4Groups.of(
        torch.zeros(16, 256, dtype=torch.int32),
        torch.ones(16, 2),
        torch.zeros(16, 2, dtype=torch.int32),
        torch.arange(256) // 128,
    )
    x = torch.zeros(1, 257, dtype=torch.bfloat16)[:, 1:]
    with pytest.raises(ValueError, match="16 bytes"):
        int4_mma(x, kept, SkinnyShape(16, 1, 256, 1, 1, 1))
