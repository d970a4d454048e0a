"""A Triton GEMM over packed four-bit weights, for any number of tiles of rows.

A turn is 128 or 256 columns: four products, one of each quarter of them. Each half of a turn is of
one group, and what its products add up to is multiplied by its scale in float32. Knows no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gemm.configs import block_tokens
from workers.layers.kept.int4 import VALUES_PER_WORD, Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.int4_rows import (
    first_lines,
    further_lines,
    headers_stride,
    load_scales,
    load_zeros,
    row_headers,
    row_words,
    turn_words,
)
from workers.layers.quantised.int4_values import int4_values
from workers.layers.quantised.prefetch import lines_within_budget
from workers.layers.quantised.skinny_shape import SkinnyShape
from workers.layers.quantised.tiles import store_parts

_VALUES = tl.constexpr(VALUES_PER_WORD)


def _int4_skinny(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    headers: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
    TURN: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    NUM_LINES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, split, block of tokens)."""
    WORDS: tl.constexpr = TURN // _VALUES  # noqa: N806
    QUARTER: tl.constexpr = TURN // 4  # noqa: N806
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    row_starts = row_words(words, safe_rows, in_features) + first_k
    if IS_DEPENDENT:
        asked = first_lines(words, safe_rows, in_features) + first_k
        prefetch_lines((asked[:, None] + further_lines(NUM_LINES)[None, :]).to(tl.int64))
    # Scales of a turn are read in the one before, so that none waits for them.
    headers_at = row_headers(headers, safe_rows, in_features // TURN, HEADER_WORDS)
    STRIDE: tl.constexpr = headers_stride(HEADER_WORDS)  # noqa: N806
    headers_at += first_k // TURN * STRIDE
    low_scales, high_scales = load_scales(headers_at, None, HEADER_WORDS)
    begin_dependent(IS_DEPENDENT)
    tokens = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    words_at = row_starts[:, None] + turn_words(WORDS)[None, :]
    columns = first_k + tl.arange(0, QUARTER)
    inputs_at = x + tokens[:, None].to(tl.int64) * in_features + columns[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    for start in range(0, k_per_split, TURN):
        packed = tl.load(words_at + start)
        turn_zeros = load_zeros(headers_at + start // TURN * STRIDE, None, HEADER_WORDS)
        here = inputs_at + start
        first = tl.trans(tl.load(here, mask=is_token, other=0.0))
        second = tl.trans(tl.load(here + QUARTER, mask=is_token, other=0.0))
        third = tl.trans(tl.load(here + 2 * QUARTER, mask=is_token, other=0.0))
        fourth = tl.trans(tl.load(here + 3 * QUARTER, mask=is_token, other=0.0))
        after = tl.minimum(start + TURN, k_per_split - TURN) // TURN
        next_low, next_high = load_scales(headers_at + after * STRIDE, None, HEADER_WORDS)
        dtype: tl.constexpr = x.dtype.element_ty
        one, two = int4_values(packed, turn_zeros & 0xFFFF, dtype, 0, IS_PACKED)
        low = tl.dot(two, second, tl.dot(one, first))
        total += low * low_scales[:, None]
        three, four = int4_values(packed, turn_zeros >> 16, dtype, 1, IS_PACKED)
        high = tl.dot(four, fourth, tl.dot(three, third))
        total += high * high_scales[:, None]
        low_scales, high_scales = next_low, next_high
    store_parts(out, total, split, tokens, rows, num_tokens, out_features)


_int4_skinny_kernel = triton.jit(_int4_skinny, do_not_specialize=("num_tokens",))


def int4_skinny(
    x: torch.Tensor, kept: Int4Groups, shape: SkinnyShape, new: NewTensor = torch.empty
) -> torch.Tensor:
    """x (n, in_features), its columns as kept has them, contiguous -> (shape.num_splits, n,
    out_features). One split has x's dtype, several are float32: their sum is the product.
    shape.block_k: kept.turn."""
    num_tokens, in_features = x.shape
    out_dtype = x.dtype if shape.num_splits == 1 else torch.float32
    size = (shape.num_splits, num_tokens, kept.out_features)
    out = new(size, dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    tokens = min(block_tokens(num_tokens), shape.block_tokens)
    num_blocks = triton.cdiv(kept.out_features, shape.block_rows)
    k_per_split = in_features // shape.num_splits
    _int4_skinny_kernel[(num_blocks, shape.num_splits, triton.cdiv(num_tokens, tokens))](
        x,
        kept.words,
        kept.headers,
        out,
        num_tokens,
        kept.out_features,
        in_features,
        k_per_split,
        HEADER_WORDS=kept.headers.shape[-1],
        TURN=kept.turn,
        BLOCK_TOKENS=tokens,
        BLOCK_ROWS=shape.block_rows,
        IS_PACKED=x.is_cuda,
        NUM_LINES=lines_within_budget(kept.out_features * shape.num_splits, k_per_split // 2),
        IS_DEPENDENT=is_dependent,
        num_stages=shape.num_stages,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
