"""A turn of four-bit weights in registers times a row of x, and a block's sums over warps.

Loads no weight.
"""

import triton
import triton.language as tl

from workers.layers.quantised.gemv import store_rows
from workers.layers.quantised.int4_fragments import row_sums, turn_sums, turn_zeros, whole
from workers.layers.quantised.int4_rows import scales_of
from workers.layers.quantised.int4_turns import chunk_at


def _run_no_sums(shape: tl.constexpr) -> tl.tensor:
    """Of a tile: of each chain those of a turn's first half and of its second."""
    num_chains: tl.constexpr = shape.chains
    chains = tl.tuple(())
    for _ in tl.static_range(num_chains):
        none = tl.zeros((32 * shape.warps, 4), dtype=tl.float32)
        chains = chains + ((none, none),)
    return chains


no_sums = triton.jit(_run_no_sums)


def _run_chained_sums(chains: tl.tensor, half: tl.constexpr, shape: tl.constexpr) -> tl.tensor:
    """float32 (threads,), of all chains, those of a lane's two rows."""
    others: tl.constexpr = shape.chains - 1
    first, second = row_sums(chains[0][half])
    for chain in tl.static_range(others):
        more = row_sums(chains[1 + chain][half])
        first, second = first + more[0], second + more[1]
    return first, second


chained_sums = triton.jit(_run_chained_sums)


def _run_multiply_turn(
    held: tl.tensor,
    x_at: tl.tensor,
    totals: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """totals and a turn's products of each tile's two rows, float32 (threads,)."""
    chunks: tl.constexpr = shape.turn // 128
    tiles: tl.constexpr = shape.tiles
    num_chains: tl.constexpr = shape.chains
    sums = tl.tuple(())
    for _ in tl.static_range(tiles):
        sums = sums + (no_sums(shape),)
    for chunk in tl.static_range(chunks):
        x = tl.tuple(())
        for quarter in tl.static_range(4):
            x = x + (tl.load(chunk_at(x_at + (quarter * (shape.turn // 8) + chunk * 16))),)
        added = tl.tuple(())
        for tile in tl.static_range(tiles):
            own = held[tile]
            zeros = turn_zeros(own[2 * chunks][0], own[2 * chunks + 1][0], dtype, IS_PACKED)
            words = own[2 * chunk], own[2 * chunk + 1]
            chains = tl.tuple(())
            for chain in tl.static_range(num_chains):
                if chain == chunk % num_chains:
                    added_to = turn_sums(words, x, zeros, sums[tile][chain], dtype, IS_PACKED)
                    chains = chains + (added_to,)
                else:
                    chains = chains + (sums[tile][chain],)
            added = added + (chains,)
        sums = added
    out = tl.tuple(())
    for tile in tl.static_range(tiles):
        low, high = chained_sums(sums[tile], 0, shape), chained_sums(sums[tile], 1, shape)
        for row in tl.static_range(2):
            scales = scales_of(held[tile][2 * chunks + row][1])
            out = out + (totals[2 * tile + row] + low[row] * scales[0] + high[row] * scales[1],)
    return out


multiply_turn = triton.jit(_run_multiply_turn)


def _run_tile_sums(
    first: tl.tensor, second: tl.tensor, dtype: tl.constexpr, shape: tl.constexpr
) -> tl.tensor:
    """float32 (16,), of a tile's rows in their order; where they are gated, each gate's and its up
    projection's. first, second: float32 (threads,), what each warp's lanes have of their rows; the
    four lanes of a row have the same."""
    both = tl.reshape(tl.join(first, second), (shape.warps, 8, 4, 2))
    rows = tl.sum(tl.sum(both, axis=2), axis=0)
    if not shape.is_gated:
        rows = tl.trans(rows)
    return tl.reshape(rows, (16,)) * (whole(dtype) / 4)


tile_sums = triton.jit(_run_tile_sums)


def _run_store_tile(
    out: tl.tensor,
    total: tl.tensor,
    tile: tl.tensor,
    shape: tl.constexpr,
    IS_GELU: tl.constexpr,  # noqa: N803
) -> None:
    """total: as tile_sums has it."""
    features = shape.further if shape.is_gated else shape.rows
    store_rows(out, total, tile, tl.program_id(1), features, 16, shape.is_gated, IS_GELU)


store_tile = triton.jit(_run_store_tile)
