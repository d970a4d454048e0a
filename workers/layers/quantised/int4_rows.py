"""Where rows of packed four-bit weights lie, for kernels whose tiles are rows and whole turns.

Eight rows lie together (kept/int4.py). Knows no product.
"""

import triton
import triton.language as tl

from workers.layers.kept.int4 import CHUNK_WORDS, ROWS_TOGETHER

_TOGETHER = tl.constexpr(ROWS_TOGETHER)
_CHUNK = tl.constexpr(CHUNK_WORDS)


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
    """Pointers to the first headers of rows, int64 (rows,). A turn is 8 * HEADER_WORDS words."""
    eights = rows // _TOGETHER * (num_turns * (_TOGETHER * HEADER_WORDS))
    return headers + eights + rows % _TOGETHER * HEADER_WORDS


row_headers = triton.jit(_run_row_headers)


def _run_half_float(word: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32, float16 from bit SHIFT on -> float32."""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


half_float = triton.jit(_run_half_float)


def _run_load_scales(
    at: tl.tensor,
    is_row: tl.tensor,
    HEADER_WORDS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Of both halves of a turn, float32 (rows,). at: of the headers, whose first words are zeros.

    is_row: (rows,), of the others they are whatever there was; or None where all are.
    """
    if HEADER_WORDS == 4:
        low = tl.load(at + 2, mask=is_row).to(tl.float32, bitcast=True)
        return low, tl.load(at + 3, mask=is_row).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - Triton takes one of branches that all return
        both = tl.load(at + 1, mask=is_row)
        return half_float(both, 0), half_float(both, 16)


load_scales = triton.jit(_run_load_scales)
