"""Where rows of packed four-bit weights lie, for kernels whose tiles are rows and whole turns.

Eight rows lie together, ROWS_TOGETHER (kept/int4.py). Knows no product.
"""

import triton
import triton.language as tl

from workers.layers.gemm.skinny import LINE_BYTES
from workers.layers.kept.int4 import CHUNK_WORDS, FLOAT_HEADER, MIDDLE, ROWS_TOGETHER, SCALES_HEADER

_TOGETHER = tl.constexpr(ROWS_TOGETHER)
_LINE_WORDS = tl.constexpr(LINE_BYTES // 4)
_CHUNK = tl.constexpr(CHUNK_WORDS)
_SCALES_HEADER, _FLOAT_HEADER = tl.constexpr(SCALES_HEADER), tl.constexpr(FLOAT_HEADER)
_BOTH_MIDDLE = tl.constexpr(MIDDLE | MIDDLE << 16)
"""A header's zeros where it has none."""


def _run_row_words(words: tl.tensor, rows: tl.tensor, in_features: tl.tensor) -> tl.tensor:
    """Pointers to the first words of rows, int64 (rows,). A turn is as many words further on as it
    has columns."""
    return words + rows // _TOGETHER * in_features + rows % _TOGETHER * _CHUNK


row_words = triton.jit(_run_row_words)


def _run_turn_words(WORDS: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 (WORDS,): how much further on a row's words of a turn are than its first."""
    places = tl.arange(0, WORDS)
    return places // _CHUNK * (_TOGETHER * _CHUNK) + places % _CHUNK


turn_words = triton.jit(_run_turn_words)


def _run_row_headers(
    headers: tl.tensor,
    rows: tl.tensor,
    num_turns: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Pointers to the first headers of rows, int64 (rows,). The next are headers_stride further."""
    eights = rows // _TOGETHER * (num_turns * (_TOGETHER * HEADER_WORDS))
    return headers + eights + rows % _TOGETHER * HEADER_WORDS


row_headers = triton.jit(_run_row_headers)


def _run_headers_stride(HEADER_WORDS: tl.constexpr) -> tl.constexpr:  # noqa: N803
    """Words from a turn's header of a row to the next turn's."""
    return _TOGETHER * HEADER_WORDS


headers_stride = triton.constexpr_function(_run_headers_stride)


def _run_first_lines(words: tl.tensor, rows: tl.tensor, in_features: tl.tensor) -> tl.tensor:
    """Pointers to a line each of what eight rows have together, int64 (rows,); the last one where
    there are fewer."""
    line = tl.minimum(rows % _TOGETHER * _LINE_WORDS, in_features - _LINE_WORDS)
    return words + rows // _TOGETHER * in_features + line


first_lines = triton.jit(_run_first_lines)


def _run_further_lines(NUM_LINES: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 (NUM_LINES,): how much further on a row's lines are than its first."""
    return tl.arange(0, NUM_LINES) * (_TOGETHER * _LINE_WORDS)


further_lines = triton.jit(_run_further_lines)


def _run_load_zeros(
    at: tl.tensor,
    is_row: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """int32 (rows,), of both halves of a turn, as a header has them. at, is_row: as
    load_scale_words."""
    if HEADER_WORDS == _SCALES_HEADER:
        return tl.full(at.shape, _BOTH_MIDDLE, dtype=tl.int32)
    else:  # noqa: RET505 - Triton takes one of branches that all return
        return tl.load(at, mask=is_row)


load_zeros = triton.jit(_run_load_zeros)


def _run_load_scale_words(
    at: tl.tensor,
    is_row: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """int32 (rows,), one or two, in which the scales of both halves of a turn are. at: of the
    headers. is_row: (rows,), of the others they are whatever there was; or None where all are."""
    if HEADER_WORDS == _FLOAT_HEADER:
        return tl.load(at + 2, mask=is_row), tl.load(at + 3, mask=is_row)
    else:  # noqa: RET505
        return (tl.load(at + (HEADER_WORDS - 1), mask=is_row),)


load_scale_words = triton.jit(_run_load_scale_words)


def _run_half_float(word: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32, float16 from bit SHIFT on -> float32."""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


_half_float = triton.jit(_run_half_float)


def _run_scales_of(words: tl.tensor) -> tl.tensor:
    """float32 (rows,), of a turn's first half and of its second. words: as load_scale_words."""
    if len(words) == 1:
        return _half_float(words[0], 0), _half_float(words[0], 16)
    else:  # noqa: RET505
        return words[0].to(tl.float32, bitcast=True), words[1].to(tl.float32, bitcast=True)


scales_of = triton.jit(_run_scales_of)


def _run_load_scales(
    at: tl.tensor,
    is_row: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """float32 (rows,), of both halves of a turn. at, is_row: as load_scale_words."""
    return scales_of(load_scale_words(at, is_row, HEADER_WORDS))


load_scales = triton.jit(_run_load_scales)
