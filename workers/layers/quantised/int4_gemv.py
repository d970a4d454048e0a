"""Packed four-bit weights times one row of x, by integer products on CUDA cores.

x becomes integers of 16 bits by a power of two a half turn (fixed_point.py). A thread has four
words of a turn, 16 columns of each of its halves: their products add up as integers, lose their
zero times the sum of x there, and only then are multiplied by the group's scale in float32. Knows
no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gate import Gate
from workers.layers.kept.int4 import VALUES_PER_WORD, Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.fixed_point import (
    float_pair,
    half_sums,
    integer,
    magnitude,
    packed,
    powers,
)
from workers.layers.quantised.gemv import new_output, store_rows, weight_rows
from workers.layers.quantised.skinny_shape import SkinnyShape

_VALUES = tl.constexpr(VALUES_PER_WORD)
_CHUNK = tl.constexpr(4)
"""Words that a thread loads at once."""


def _run_half_inputs(
    x: tl.tensor,
    pairs: tl.tensor,
    further: tl.tensor,
    TURNS: tl.constexpr,  # noqa: N803
    CHUNKS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """x's elements 2 * pairs and the next, and those further pairs on, of one half of each turn;
    pairs: int32 (words,). -> both as packed pairs (turns, chunks, words), their sums (turns,
    chunks), and float32 (turns,) that a sum is to be multiplied by."""
    a, b = float_pair(x, pairs, TURNS, CHUNKS)
    c, d = float_pair(x, pairs + further, TURNS, CHUNKS)
    first = tl.maximum(magnitude(a), magnitude(b))
    largest = tl.maximum(first, tl.maximum(magnitude(c), magnitude(d)))
    up, down = powers(tl.max(tl.max(largest, axis=2), axis=1))
    up = up[:, None, None]
    a, b, c, d = integer(a, up), integer(b, up), integer(c, up), integer(d, up)
    return packed(a, b), packed(c, d), tl.sum((a + b) + (c + d), axis=2), down


half_inputs = triton.jit(_run_half_inputs)


def _run_scaled_sums(
    sums: tl.tensor,
    zeros: tl.tensor,
    x_sums: tl.tensor,
    scales: tl.tensor,
) -> tl.tensor:
    """sums int32 (rows, turns, chunks), zeros int32 and scales float32 (rows, turns), x_sums int32
    (turns, chunks) -> float32 (rows, turns, chunks)."""
    integers = sums - zeros[:, :, None] * x_sums[None, :, :]
    return integers.to(tl.float32) * scales[:, :, None]


scaled_sums = triton.jit(_run_scaled_sums)


def _run_group_scales(
    scales: tl.tensor, groups: tl.tensor, rows: tl.tensor, out_features: tl.tensor
) -> tl.tensor:
    """float32 (rows, groups). groups: of each turn of columns. out_features: of the weight."""
    return tl.load(scales + groups[None, :] * out_features + rows[:, None]).to(tl.float32)


group_scales = triton.jit(_run_group_scales)


def _int4_gemv(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    words_per_row: tl.tensor,
    words_per_split: tl.tensor,
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    TURN: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, split)."""
    WORDS: tl.constexpr = BLOCK_K // _VALUES  # noqa: N806
    TURNS: tl.constexpr = BLOCK_K // TURN  # noqa: N806
    CHUNKS: tl.constexpr = TURN // _VALUES // _CHUNK  # noqa: N806
    rows = weight_rows(out_features, BLOCK_ROWS, IS_GATED)
    split = tl.program_id(1)
    first_word = split * words_per_split
    row_starts = words + (rows * words_per_row + first_word)
    if IS_DEPENDENT:
        prefetch_lines(row_starts.to(tl.int64))
    begin_dependent(IS_DEPENDENT)
    turns, places = tl.arange(0, TURNS), tl.arange(0, WORDS)
    words_at = row_starts[:, None] + places[None, :]
    pairs = first_word * 4 + places // (TURN // _VALUES) * (TURN // 2) + places % (TURN // _VALUES)
    rows_of_weight = 2 * out_features if IS_GATED else out_features
    sums = tl.zeros((BLOCK_ROWS, TURNS, CHUNKS), dtype=tl.float32)
    for start in tl.range(0, words_per_split, WORDS, num_stages=STAGES):
        tile = tl.load(words_at + start, eviction_policy="evict_first")
        turn = (first_word + start) // (TURN // _VALUES) + turns
        both_zeros = tl.load(zeros + turn[None, :] * rows_of_weight + rows[:, None])
        low_scales = group_scales(scales, turn * TURN // GROUP_SIZE, rows, rows_of_weight)
        high_group = (turn * TURN + TURN // 2) // GROUP_SIZE
        high_scales = group_scales(scales, high_group, rows, rows_of_weight)
        here = pairs + start * 4
        one, two, low_x, low_down = half_inputs(x, here, TURN // 8, TURNS, CHUNKS)
        three, four, high_x, high_down = half_inputs(x, here + TURN // 4, TURN // 8, TURNS, CHUNKS)
        tile = tl.reshape(tile, (BLOCK_ROWS, TURNS, CHUNKS, _CHUNK))
        low, high = half_sums(
            tile,
            tl.broadcast_to(one[None, :, :, :], tile.shape),
            tl.broadcast_to(two[None, :, :, :], tile.shape),
            tl.broadcast_to(three[None, :, :, :], tile.shape),
            tl.broadcast_to(four[None, :, :, :], tile.shape),
            IS_PACKED,
        )
        low_scales *= low_down[None, :]
        high_scales *= high_down[None, :]
        sums += scaled_sums(tl.sum(low, axis=3), both_zeros & 0xFFFF, low_x, low_scales)
        sums += scaled_sums(tl.sum(high, axis=3), both_zeros >> 16, high_x, high_scales)
    total = tl.sum(tl.sum(sums, axis=2), axis=1)
    store_rows(out, total, tl.program_id(0), split, out_features, BLOCK_ROWS, IS_GATED, IS_GELU)


_int4_gemv_kernel = triton.jit(_int4_gemv)


def int4_gemv(
    x: torch.Tensor,
    kept: Int4Groups,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
    gate: Gate | None = None,
) -> torch.Tensor:
    """x (1, in_features), its columns as kept has them, contiguous -> (shape.num_splits, 1,
    out_features); with a gate the activation, (1, 1, out_features / 2), of a weight that is gate
    over up. One split has x's dtype, several are float32: their sum is the product. shape.block_k:
    a multiple of kept.turn. Raises ValueError as new_output does."""
    out = new_output(x, kept.out_features, shape, gate, new)
    is_dependent = dependent_launch(x)
    words_per_row = kept.words.shape[1]
    words_per_split = words_per_row // shape.num_splits
    _int4_gemv_kernel[(triton.cdiv(kept.out_features, shape.block_rows), shape.num_splits)](
        x,
        kept.words,
        kept.scales,
        kept.zeros,
        out,
        out.shape[2],
        words_per_row,
        words_per_split,
        GROUP_SIZE=kept.group_size,
        TURN=kept.turn,
        BLOCK_ROWS=shape.block_rows,
        BLOCK_K=shape.block_k,
        IS_GATED=gate is not None,
        IS_GELU=gate == "gelu_tanh",
        IS_PACKED=x.is_cuda,
        STAGES=shape.num_stages,
        IS_DEPENDENT=is_dependent,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
