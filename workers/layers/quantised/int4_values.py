"""Four-bit integers in registers, as the input's dtype and less their zeros.

bfloat16 has the integers from 128 to 255 exactly, its last bits being theirs: 0x4300 with a value
in them is 128 and that value; so has float16 those from 1,024 on, by 0x6400. The same in two halves
of a register at once, over all eight values of two words, takes a few instructions; PTX, because
Triton has no such halves. Knows no product.
"""

import triton
import triton.language as tl

BFLOAT16_BASE, FLOAT16_BASE = 0x4300, 0x6400


def assembly(base: int, kind: str) -> str:
    """$0 to $7: the values of each shift, of two words $8, $9. $10, $11: bits of base with the zero
    of the first four in both halves, by word; $12, $13: of the last four. kind: of the halves."""
    lines = [
        ".reg .b32 low, high, lowz, highz, s, v;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
        "prmt.b32 lowz, $10, $11, 0x5410;",
        "prmt.b32 highz, $12, $13, 0x5410;",
    ]
    for place in range(8):
        half, shift = ("low", "high")[place // 4], 4 * (place % 4)
        if shift:
            lines.append(f"shr.u32 s, {half}, {shift};")
        source = "s" if shift else half
        lines.append(f"lop3.b32 v, {source}, 0x000F000F, {base * 0x10001:#x}, 0xEA;")
        lines.append(f"sub.rn.{kind} ${place}, v, {half}z;")
    return "{ " + " ".join(lines) + " }"


_BFLOAT16 = tl.constexpr(assembly(BFLOAT16_BASE, "bf16x2"))
_FLOAT16 = tl.constexpr(assembly(FLOAT16_BASE, "f16x2"))
_BFLOAT16_BASE, _FLOAT16_BASE = tl.constexpr(BFLOAT16_BASE), tl.constexpr(FLOAT16_BASE)
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))


def _run_zero_bits(zeros: tl.tensor, words: tl.tensor, BASE: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 of words' shape: base with the row's zero, in both halves."""
    bits = zeros | BASE
    return tl.broadcast_to((bits | (bits << 16))[:, None], words.shape)


_zero_bits = triton.jit(_run_zero_bits)


def _run_bfloat16_values(words: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        _BFLOAT16,
        _CONSTRAINTS,
        [words, _zero_bits(low, words, _BFLOAT16_BASE), _zero_bits(high, words, _BFLOAT16_BASE)],
        dtype=(
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )


_bfloat16_values = triton.jit(_run_bfloat16_values)


def _run_float16_values(words: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        _FLOAT16,
        _CONSTRAINTS,
        [words, _zero_bits(low, words, _FLOAT16_BASE), _zero_bits(high, words, _FLOAT16_BASE)],
        dtype=(
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
        ),
        is_pure=True,
        pack=2,
    )


_float16_values = triton.jit(_run_float16_values)


def _run_any_values(
    words: tl.tensor,
    low_zeros: tl.tensor,
    high_zeros: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """By arithmetic that any device has."""
    low, high = low_zeros[:, None], high_zeros[:, None]
    return (
        ((words & 15) - low).to(dtype),
        ((words >> 4 & 15) - low).to(dtype),
        ((words >> 8 & 15) - low).to(dtype),
        ((words >> 12 & 15) - low).to(dtype),
        ((words >> 16 & 15) - high).to(dtype),
        ((words >> 20 & 15) - high).to(dtype),
        ((words >> 24 & 15) - high).to(dtype),
        ((words >> 28 & 15) - high).to(dtype),
    )


_any_values = triton.jit(_run_any_values)


def _run_int4_values(
    words: tl.tensor,
    low_zeros: tl.tensor,
    high_zeros: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words) -> values less zeros by shift, 0 to 7, each (rows, words) of dtype.
    low_zeros: int32 (rows,), of the first four; high_zeros: of the others. IS_PACKED: dtype has
    16 bits and this is a GPU from sm90 on."""
    if not IS_PACKED:
        return _any_values(words, low_zeros, high_zeros, dtype)
    else:  # noqa: RET505 - Triton takes one of branches that all return
        if dtype == tl.bfloat16:
            return _bfloat16_values(words, low_zeros, high_zeros)
        else:  # noqa: RET505
            return _float16_values(words, low_zeros, high_zeros)


int4_values = triton.jit(_run_int4_values)
