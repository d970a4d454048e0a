"""Packed four-bit weights as a matrix of 16 bits, for products of many rows. Knows no product."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.kept.int4 import VALUES_PER_WORD, Int4Groups
from workers.layers.quantised.int4_rows import (
    headers_stride,
    load_scales,
    load_zeros,
    row_headers,
    row_words,
    turn_words,
)
from workers.layers.quantised.int4_values import int4_values

_VALUES = tl.constexpr(VALUES_PER_WORD)
_BLOCK_ROWS = 32


def _int4_spread(  # noqa: PLR0913
    words: tl.tensor,
    headers: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
    TURN: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, turn)."""
    begin_dependent(IS_DEPENDENT)
    WORDS: tl.constexpr = TURN // _VALUES  # noqa: N806
    QUARTER: tl.constexpr = TURN // 4  # noqa: N806
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    is_row = rows < out_features
    start = tl.program_id(1) * TURN
    words_at = row_words(words, rows, in_features)[:, None] + turn_words(WORDS)[None, :]
    packed = tl.load(words_at + start, mask=is_row[:, None], other=0)
    columns = start + tl.arange(0, QUARTER)
    target = out + rows[:, None] * in_features + columns[None, :]
    headers_at = row_headers(headers, rows, in_features // TURN, HEADER_WORDS)
    headers_at += tl.program_id(1) * headers_stride(HEADER_WORDS)
    turn_zeros = load_zeros(headers_at, is_row, HEADER_WORDS)
    low_scales, high_scales = load_scales(headers_at, is_row, HEADER_WORDS)
    for half in tl.static_range(2):
        scale = high_scales if half else low_scales
        half_zeros = turn_zeros >> 16 if half else turn_zeros & 0xFFFF
        pairs = int4_values(packed, half_zeros, out.dtype.element_ty, half, IS_PACKED)
        for place in tl.static_range(2):
            matrix = (pairs[place].to(tl.float32) * scale[:, None]).to(out.dtype.element_ty)
            here = target + (2 * half + place) * QUARTER
            tl.store(here, matrix, mask=is_row[:, None])


_int4_spread_kernel = triton.jit(_int4_spread)


def int4_spread(kept: Int4Groups, dtype: torch.dtype) -> torch.Tensor:
    """(out_features, in_features) of dtype, columns as kept has them, each rounded once."""
    out = torch.empty((kept.out_features, kept.in_features), dtype=dtype, device=kept.words.device)
    is_dependent = dependent_launch(out)
    _int4_spread_kernel[
        (triton.cdiv(kept.out_features, _BLOCK_ROWS), kept.in_features // kept.turn)
    ](
        kept.words,
        kept.headers,
        out,
        kept.out_features,
        kept.in_features,
        HEADER_WORDS=kept.headers.shape[-1],
        TURN=kept.turn,
        BLOCK_ROWS=_BLOCK_ROWS,
        IS_PACKED=out.is_cuda,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out
