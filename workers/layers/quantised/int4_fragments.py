"""Packed four-bit weights as registers of a tensor core product with one row of x.

A word has a pair of columns from each quarter of its turn (kept/int4.py), and a lane of
mma.m16n8k16 has pairs of columns of two rows: its words are its operands, once a mask has left one
quarter in each half of a register. Bits of a four-bit integer that are read as a 16-bit float are
that integer times the least subnormal, four bits further left 16 times as much, so that one
multiplication and addition leave (value - zero) * UNIT, exactly. PTX, because Triton says neither
which lane has what nor that two halves are multiplied at once. Source of the registers' order: PTX
instruction set, "Matrix Fragments for mma.m16n8k16 with floating point type". Knows no kernel.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Half(NamedTuple):
    """A float of 16 bits. low, high: bits of what makes UNIT of the least bit and of the fifth.
    unit: UNIT's exponent of two, negated."""

    name: str
    low: int
    high: int
    unit: int


BFLOAT16 = Half("bf16", 0x7F00, 0x7D00, 6)
"""2**127, 2**123; the least subnormal is 2**-133."""
FLOAT16 = Half("f16", 0x7800, 0x6800, 9)
"""2**15, 2**11; the least subnormal is 2**-24."""
_IN_BOTH, _SIGNS = 0x10001, 0x80008000


def zeros_assembly(half: Half) -> str:
    """$0, $1: -zero * UNIT in both halves of a register, of $2's low 16 bits and of its high."""
    minus = half.low * _IN_BOTH | _SIGNS
    lines = [".reg .b32 m, z;", f"mov.b32 m, {minus:#x};"]
    for place, selector in enumerate(("0x1010", "0x3232")):
        lines += [f"prmt.b32 z, $2, $2, {selector};", f"mul.rn.{half.name}x2 ${place}, z, m;"]
    return "{ " + " ".join(lines) + " }"


def products_assembly(half: Half) -> str:
    """Four words of two rows times x, of a turn's first half and of its second.

    $0..$3 and $4..$7: the sums of both, accumulators of 16 rows and 8 columns. $8..$11, $12..$15:
    words of the lane's rows. $16..$31: x's pairs, four of each quarter. $32..$35: zeros as
    zeros_assembly leaves them, first row's of both halves, then second row's. $36..$43: what the
    sums are added to.
    """
    lines = [".reg .b32 l, h, s<4>, a<4>;"]
    lines += [f"mov.b32 l, {half.low * _IN_BOTH:#x};", f"mov.b32 h, {half.high * _IN_BOTH:#x};"]
    for pair in range(2):
        words = [f"${8 + 4 * row + 2 * pair + word}" for word in range(2) for row in range(2)]
        lines += [f"shr.u32 s{place}, {word}, 8;" for place, word in enumerate(words)]
        shifted = [f"s{place}" for place in range(4)]
        for quarter in range(2):
            lines += _quarter(half, words, 0, quarter, pair)
            lines += _quarter(half, shifted, 1, quarter, pair)
    return "{ " + " ".join(lines) + " }"


def _quarter(half: Half, words: list[str], part: int, quarter: int, pair: int) -> list[str]:
    """Two words' values of a quarter of the part, a half turn. words: of both rows, then the
    second ones of both."""
    mask, factor = (("0x000F000F", "l"), ("0x00F000F0", "h"))[quarter]
    lines = []
    for place, word in enumerate(words):
        zero = f"${32 + 2 * (place % 2) + part}"
        lines.append(f"and.b32 a{place}, {word}, {mask};")
        lines.append(f"fma.rn.{half.name}x2 a{place}, a{place}, {factor}, {zero};")
    sums = ", ".join(f"${4 * part + place}" for place in range(4))
    first = 4 * part + (36 if pair == quarter == 0 else 0)
    added = ", ".join(f"${first + place}" for place in range(4))
    x_at = 16 + 4 * (2 * part + quarter) + 2 * pair
    kind = f"f32.{half.name}.{half.name}.f32"
    product = f"{{{sums}}}, {{a0, a1, a2, a3}}, {{${x_at}, ${x_at + 1}}}, {{{added}}};"
    return [*lines, f"mma.sync.aligned.m16n8k16.row.col.{kind} {product}"]


_BFLOAT16_ZEROS = tl.constexpr(zeros_assembly(BFLOAT16))
_FLOAT16_ZEROS = tl.constexpr(zeros_assembly(FLOAT16))
_BFLOAT16_PRODUCTS = tl.constexpr(products_assembly(BFLOAT16))
_FLOAT16_PRODUCTS = tl.constexpr(products_assembly(FLOAT16))
_ZEROS_CONSTRAINTS = tl.constexpr("=&r,=&r,r")
_PRODUCTS_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 28 + ["f"] * 8))
_BFLOAT16_WHOLE = tl.constexpr(float(1 << BFLOAT16.unit))
_FLOAT16_WHOLE = tl.constexpr(float(1 << FLOAT16.unit))


def _run_whole(dtype: tl.constexpr) -> tl.constexpr:
    """1 / UNIT."""
    return _BFLOAT16_WHOLE if dtype == tl.bfloat16 else _FLOAT16_WHOLE


whole = triton.constexpr_function(_run_whole)


def _run_row_zeros(
    zeros: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    if IS_PACKED:
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16_ZEROS if dtype == tl.bfloat16 else _FLOAT16_ZEROS,
            _ZEROS_CONSTRAINTS,
            [zeros],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return low, high
    else:  # noqa: RET505 - Triton takes one of branches that all return
        return zeros & 0xFFFF, zeros >> 16


_row_zeros = triton.jit(_run_row_zeros)


def _run_turn_zeros(
    first: tl.tensor,
    second: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """int32 (threads,), a turn's zeros of a lane's two rows -> (threads, 4), as turn_sums has
    them."""
    first_low, first_high = _row_zeros(first, dtype, IS_PACKED)
    second_low, second_high = _row_zeros(second, dtype, IS_PACKED)
    low, high = tl.join(first_low, second_low), tl.join(first_high, second_high)
    return tl.reshape(tl.join(low, high), (low.shape[0], 4))


turn_zeros = triton.jit(_run_turn_zeros)


def _run_pair_values(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """int32, two halves of dtype -> both as float32."""
    if dtype == tl.bfloat16:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        return low, (pairs & -65536).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


_pair_values = triton.jit(_run_pair_values)


def _run_any_row(
    words: tl.tensor,
    pairs: tl.tensor,
    further: tl.tensor,
    zeros: tl.tensor,
    dtype: tl.constexpr,
    SHIFT: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """float32 (threads,): a row's sum of two quarters, of the four lanes that share it."""
    a, b = _pair_values(pairs, dtype)
    c, d = _pair_values(further, dtype)
    zeros = zeros[:, None]
    one = ((words >> SHIFT & 15) - zeros) * a + ((words >> SHIFT + 16 & 15) - zeros) * b
    two = ((words >> SHIFT + 4 & 15) - zeros) * c + ((words >> SHIFT + 20 & 15) - zeros) * d
    own = tl.reshape(tl.sum(one + two, axis=1), (words.shape[0] // 4, 4))
    of_all = tl.broadcast_to(tl.sum(own, axis=1)[:, None], own.shape)
    return tl.reshape(of_all, (words.shape[0],)) * (1.0 / whole(dtype))


_any_row = triton.jit(_run_any_row)


def _run_in_columns(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Sums of a lane's rows, (threads,) -> an accumulator whose columns all have them."""
    rows = tl.join(first, second)
    columns = tl.broadcast_to(rows[:, :, None], (rows.shape[0], 2, 2))
    return tl.reshape(columns, (rows.shape[0], 4))


_in_columns = triton.jit(_run_in_columns)


def _run_turn_sums(
    words: tl.tensor,
    x: tl.tensor,
    zeros: tl.tensor,
    sums: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """sums, float32 (threads, 4), accumulators of a turn's halves, and products.

    words: int32 (threads, 4), of a lane's first row and of its second. x: four of that shape, the
    pairs of each quarter that belong to them. zeros: as turn_zeros leaves them. Where IS_PACKED a
    thread has to have the four numbers of its row of these tensors.
    """
    first, second = words
    low, high = sums
    if IS_PACKED:
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16_PRODUCTS if dtype == tl.bfloat16 else _FLOAT16_PRODUCTS,
            _PRODUCTS_CONSTRAINTS,
            [first, second, x[0], x[1], x[2], x[3], zeros, low, high],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        return low, high
    else:  # noqa: RET505
        lows, highs = tl.split(tl.reshape(zeros, (zeros.shape[0], 2, 2)))
        first_low, second_low = tl.split(lows)
        first_high, second_high = tl.split(highs)
        low += _in_columns(
            _any_row(first, x[0], x[1], first_low, dtype, 0),
            _any_row(second, x[0], x[1], second_low, dtype, 0),
        )
        high += _in_columns(
            _any_row(first, x[2], x[3], first_high, dtype, 8),
            _any_row(second, x[2], x[3], second_high, dtype, 8),
        )
        return low, high


turn_sums = triton.jit(_run_turn_sums)


def _run_row_sums(sums: tl.tensor) -> tl.tensor:
    """An accumulator -> float32 (threads,), those of a lane's two rows."""
    columns, _ = tl.split(tl.reshape(sums, (sums.shape[0], 2, 2)))
    return tl.split(columns)


row_sums = triton.jit(_run_row_sums)
