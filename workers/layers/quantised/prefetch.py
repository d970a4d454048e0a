"""How much of a kept weight comes to L2 before its kernel's predecessor ends. Launches nothing."""

from workers.layers.cuda.launch import next_power_of_2
from workers.layers.gemm.skinny import (
    LINE_BYTES,
    MAX_LINE_PREFETCH_BYTES,
    PREFETCH_BUDGET_BYTES,
)

CHUNK_BUDGET_BYTES = PREFETCH_BUDGET_BYTES
"""Of all programs of a launch that reads by the copy engine, whether or not they run at once."""
_LINE_BYTES = int(LINE_BYTES.value)
_MIN_CHUNK_BYTES = 16


def chunk_bytes(num_rows: int, row_bytes: int) -> int:
    """Of each of num_rows parts of rows that programs read, by the copy engine: a power of two, all
    together within CHUNK_BUDGET_BYTES. row_bytes: a multiple of 16."""
    return max(_MIN_CHUNK_BYTES, _power_within(min(CHUNK_BUDGET_BYTES // num_rows, row_bytes)))


def num_lines(num_rows: int, row_bytes: int) -> int:
    """The same by loads of single lines, within PREFETCH_BUDGET_BYTES: every row has one."""
    most = min(PREFETCH_BUDGET_BYTES // num_rows, row_bytes, MAX_LINE_PREFETCH_BYTES)
    return max(1, _power_within(most) // _LINE_BYTES)


def _power_within(most: int) -> int:
    return next_power_of_2(most + 1) // 2
