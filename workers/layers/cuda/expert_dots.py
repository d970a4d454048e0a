"""Products of a block's rows and tiles of weights that tensor maps bring, in registers.

IS_SWAPPED, as everywhere here: as expert_maps.MappedTiles. Knows no expert's bias or gate.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _run_multiplied(
    rows: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    IS_SWAPPED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """total + rows (ROWS, DEPTH) @ weight (COLUMNS, DEPTH).T, or that transposed."""
    if IS_SWAPPED:
        return tl.dot(weight, rows.T, total)
    else:  # noqa: RET505
        return tl.dot(rows, weight.T, total)


multiplied = triton.jit(_run_multiplied)


def _run_no_total(
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_SWAPPED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    if IS_SWAPPED:
        return tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    else:  # noqa: RET505
        return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


no_total = triton.jit(_run_no_total)


def _run_inner(
    x_at: tl.tensor,
    start: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Rows from start on, zeros beyond their ends: what is no number is none times zero too."""
    is_inner = tl.arange(0, DEPTH) < (DEPTH_SIZE - start if DEPTH_SIZE % DEPTH else DEPTH)
    return tl.load(x_at + start, mask=is_inner[None, :], other=0.0)


inner = triton.jit(_run_inner)


def _run_two_products(  # noqa: PLR0913
    x_at: tl.tensor,
    weight_map: tl.tensor,
    expert: tl.tensor,
    tile: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    IS_SWAPPED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """gate, up: float32 (ROWS, COLUMNS). weight_map: of all experts' rows."""
    row = expert * (2 * WIDTH) + tile * COLUMNS
    gate = no_total(ROWS, COLUMNS, IS_SWAPPED)
    up = no_total(ROWS, COLUMNS, IS_SWAPPED)
    for start in range(0, DEPTH_SIZE, DEPTH):
        part = inner(x_at, start, DEPTH_SIZE, DEPTH)
        gate = multiplied(part, weight_map.load([row, start]), gate, IS_SWAPPED)
        up = multiplied(part, weight_map.load([row + WIDTH, start]), up, IS_SWAPPED)
    if IS_SWAPPED:
        gate, up = tl.trans(gate), tl.trans(up)
    return gate, up


two_products = triton.jit(_run_two_products)
