"""What becomes of the experts' products in registers: biases, the gate, a program's place.

Knows no way of loading.
"""

import triton
import triton.language as tl


def _run_add_bias(
    product: tl.tensor,
    bias_at: tl.tensor,
    is_column: tl.tensor,
    HAS_BIAS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """product: float32 (rows, columns); bias_at: pointers (columns,)."""
    if HAS_BIAS:
        product += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return product


add_bias = triton.jit(_run_add_bias)


def _run_add_rows(product: tl.tensor, rows_at: tl.tensor, is_added: tl.tensor) -> tl.tensor:
    """product: float32 (rows, columns); rows_at: pointers of that shape. What nothing is added to
    stays the same bits, which 0.0 on top would make 0.0 of -0.0."""
    rows = tl.load(rows_at, mask=is_added, other=0.0).to(tl.float32)
    return tl.where(is_added, product + rows, product)


add_rows = triton.jit(_run_add_rows)


def _run_gated(
    gate: tl.tensor,
    up: tl.tensor,
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    dtype: tl.constexpr,
) -> tl.tensor:
    """float32 gate and up of one shape, biases included -> dtype. As routed_experts.gated."""
    if LIMIT > 0:
        # Not minimum and maximum: what is no number has to stay none.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    activated = (gate * tl.sigmoid(ALPHA * gate)).to(dtype).to(tl.float32) * up
    return activated.to(dtype)


gated = triton.jit(_run_gated)


def _run_place(
    max_blocks: tl.tensor,
    NUM_TILES: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """(block, tile) of this program: GROUP blocks take a tile of weights one after the other, and
    all their tiles come before the next blocks."""
    program = tl.program_id(0)
    first = program // (NUM_TILES * GROUP) * GROUP
    num_blocks = tl.minimum(max_blocks - first, GROUP)
    within = program % (NUM_TILES * GROUP)
    return first + within % num_blocks, within // num_blocks


place = triton.jit(_run_place)
