"""How many lines of a row are asked for ahead: within the row, and by each thread once."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.gemm.skinny import MAX_LINE_PREFETCH_BYTES, PREFETCH_BUDGET_BYTES
from workers.layers.quantised.prefetch import lines_by_threads, lines_within_budget
from workers.layers.quantised.skinny_shape import SkinnyShape

ROW_BYTES = (64, 128, 512, 1792, 4096, 14336)


def test_all_programs_of_a_launch_keep_to_a_budget() -> None:
    for num_rows, row_bytes in product((48, 6144, 57344, 1 << 20), ROW_BYTES):
        lines = lines_within_budget(num_rows, row_bytes)
        assert lines & (lines - 1) == 0
        assert lines == 1 or lines * 128 <= min(row_bytes, MAX_LINE_PREFETCH_BYTES)
        assert lines == 1 or lines * 128 * num_rows <= PREFETCH_BUDGET_BYTES
    assert lines_within_budget(6144, 2048) == MAX_LINE_PREFETCH_BYTES // 128


def test_each_thread_asks_for_a_line() -> None:
    for rows, warps, row_bytes in product((4, 8, 16, 32), (1, 2, 4, 8), ROW_BYTES):
        lines = lines_by_threads(SkinnyShape(rows, 1, 128, 1, 1, warps), row_bytes)
        assert lines & (lines - 1) == 0
        assert lines == 1 or (lines * rows <= 32 * warps and lines * 128 <= row_bytes)
    assert lines_by_threads(SkinnyShape(8, 1, 128, 1, 1, 4), 4096) == 16
    assert lines_by_threads(SkinnyShape(16, 1, 128, 1, 1, 4), 512) == 4
