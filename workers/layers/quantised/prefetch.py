"""How much of a kept weight comes to L2 before its kernel's predecessor ends. Launches nothing."""

from workers.layers.cuda.launch import next_power_of_2
from workers.layers.gemm.skinny import (
    LINE_BYTES,
    MAX_LINE_PREFETCH_BYTES,
    PREFETCH_BUDGET_BYTES,
)
from workers.layers.quantised.skinny_shape import SkinnyShape

LINES_PER_THREAD = 1
_LINE_BYTES = int(LINE_BYTES.value)
_WARP_SIZE = 32


def lines_within_budget(num_rows: int, row_bytes: int) -> int:
    """Of each of num_rows parts of rows that all programs read, which run at once: a power of two,
    and at least one."""
    most = min(PREFETCH_BUDGET_BYTES // num_rows, row_bytes, MAX_LINE_PREFETCH_BYTES)
    return _power_within(most // _LINE_BYTES)


def lines_by_threads(shape: SkinnyShape, row_bytes: int) -> int:
    """The same where programs are many, and each asks for its first lines when it starts: by
    LINES_PER_THREAD requests of each of its threads. Fewer addresses than threads would be asked
    for several times."""
    threads = _WARP_SIZE * shape.num_warps
    most = LINES_PER_THREAD * threads // shape.block_rows
    return _power_within(min(most, row_bytes // _LINE_BYTES))


def _power_within(most: int) -> int:
    return next_power_of_2(max(1, most) + 1) // 2
