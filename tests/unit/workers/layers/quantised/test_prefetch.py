"""How many lines of a row are asked for ahead: within the row, all programs within a budget."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.gemm.skinny import MAX_LINE_PREFETCH_BYTES, PREFETCH_BUDGET_BYTES
from workers.layers.quantised.prefetch import lines_within_budget

ROW_BYTES = (64, 128, 512, 1792, 4096, 14336)


def test_all_programs_of_a_launch_keep_to_a_budget() -> None:
    for num_rows, row_bytes in product((48, 6144, 57344, 1 << 20), ROW_BYTES):
        lines = lines_within_budget(num_rows, row_bytes)
        assert lines & (lines - 1) == 0
        assert lines == 1 or lines * 128 <= min(row_bytes, MAX_LINE_PREFETCH_BYTES)
        assert lines == 1 or lines * 128 * num_rows <= PREFETCH_BUDGET_BYTES
    assert lines_within_budget(6144, 2048) == MAX_LINE_PREFETCH_BYTES // 128
