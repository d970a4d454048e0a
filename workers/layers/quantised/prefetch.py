"""How much of a kept weight comes to L2 before its kernel's predecessor ends. Launches nothing."""

from workers.layers.cuda.launch import next_power_of_2
from workers.layers.gemm.skinny import (
    LINE_BYTES,
    MAX_LINE_PREFETCH_BYTES,
    PREFETCH_BUDGET_BYTES,
)

_LINE_BYTES = int(LINE_BYTES.value)


def lines_within_budget(num_rows: int, row_bytes: int) -> int:
    """Of each of num_rows parts of rows that all programs read, which run at once: a power of two,
    and at least one."""
    most = min(PREFETCH_BUDGET_BYTES // num_rows, row_bytes, MAX_LINE_PREFETCH_BYTES)
    return next_power_of_2(max(1, most // _LINE_BYTES) + 1) // 2
