"""Four-bit integers in registers, as the input's dtype and less their zeros.

bfloat16 has the integers from 128 to 255 exactly, its last bits being theirs: 0x4300 with a value
in them is 128 and that value; so has float16 those from 1,024 on, by 0x6400. A word's four pairs
are a shift, a mask and a subtraction each, in two halves of a register at once; PTX, because
Triton has no such halves. Knows no product.
"""

import triton
import triton.language as tl

from workers.layers.quantised.tiles import joined

BFLOAT16_BASE, FLOAT16_BASE = 0x4300, 0x6400


def assembly(base: int, kind: str, half: int) -> str:
    """$0, $1 and $2, $3: two pairs of the word $4, the first or, with half 1, the last. $5: base
    with their zero, in both halves. kind: of the halves."""
    lines = [".reg .b32 s, v;"]
    for pair in range(2):
        shift = 4 * (2 * half + pair)
        if shift:
            lines.append(f"shr.u32 s, $4, {shift};")
        source = "s" if shift else "$4"
        lines.append(f"lop3.b32 v, {source}, 0x000F000F, {base * 0x10001:#x}, 0xEA;")
        lines.append(f"sub.rn.{kind} v, v, $5;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, v;")
    return "{ " + " ".join(lines) + " }"


_BFLOAT16_LOW = tl.constexpr(assembly(BFLOAT16_BASE, "bf16x2", 0))
_BFLOAT16_HIGH = tl.constexpr(assembly(BFLOAT16_BASE, "bf16x2", 1))
_FLOAT16_LOW = tl.constexpr(assembly(FLOAT16_BASE, "f16x2", 0))
_FLOAT16_HIGH = tl.constexpr(assembly(FLOAT16_BASE, "f16x2", 1))
_BFLOAT16_BASE, _FLOAT16_BASE = tl.constexpr(BFLOAT16_BASE), tl.constexpr(FLOAT16_BASE)
_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,r,r")


def _run_zero_bits(zeros: tl.tensor, words: tl.tensor, BASE: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 of words' shape: base with the row's zero, in both halves."""
    bits = zeros | BASE
    return tl.broadcast_to((bits | (bits << 16))[:, None], words.shape)


_zero_bits = triton.jit(_run_zero_bits)


def _run_bfloat16_values(
    words: tl.tensor,
    zeros: tl.tensor,
    HALF: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    return tl.inline_asm_elementwise(
        _BFLOAT16_HIGH if HALF else _BFLOAT16_LOW,
        _CONSTRAINTS,
        [words, _zero_bits(zeros, words, _BFLOAT16_BASE)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


_bfloat16_values = triton.jit(_run_bfloat16_values)


def _run_float16_values(
    words: tl.tensor,
    zeros: tl.tensor,
    HALF: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    return tl.inline_asm_elementwise(
        _FLOAT16_HIGH if HALF else _FLOAT16_LOW,
        _CONSTRAINTS,
        [words, _zero_bits(zeros, words, _FLOAT16_BASE)],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


_float16_values = triton.jit(_run_float16_values)


def _run_any_values(
    words: tl.tensor,
    zeros: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """By arithmetic that any device has."""
    here, zero = words >> (8 * HALF), zeros[:, None]
    return (
        ((here & 15) - zero).to(dtype),
        ((here >> 16 & 15) - zero).to(dtype),
        ((here >> 4 & 15) - zero).to(dtype),
        ((here >> 20 & 15) - zero).to(dtype),
    )


_any_values = triton.jit(_run_any_values)


def _run_int4_values(
    words: tl.tensor,
    zeros: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words) of a turn, zeros int32 (rows,) of one half of it -> values less
    zeros of that half's quarters, both (rows, 2 * words) of dtype. HALF: 0 or 1. IS_PACKED: dtype
    has 16 bits and this is a GPU from sm90 on."""
    if not IS_PACKED:
        a, b, c, d = _any_values(words, zeros, dtype, HALF)
    elif dtype == tl.bfloat16:
        a, b, c, d = _bfloat16_values(words, zeros, HALF)
    else:
        a, b, c, d = _float16_values(words, zeros, HALF)
    return joined(a, b), joined(c, d)


int4_values = triton.jit(_run_int4_values)
