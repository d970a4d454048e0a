"""MXFP4 in registers, as the input's dtype and times its scale, exactly.

A value's three bits of magnitude at the border of bfloat16's exponent and mantissa are the value
times 2**-126, zero and one half included; the scale, which a stack keeps times 2**126, makes it
whole. PTX, as for four-bit integers: two values of two words in one register. Knows no product.
"""

import triton
import triton.language as tl


def _moved(half: str, bits: int, out: str) -> str:
    """To the left by bits; to the right where they are negative."""
    kind = "shl.b32" if bits >= 0 else "shr.u32"
    return f"{kind} {out}, {half}, {abs(bits)};"


def _assembly() -> str:
    """$0 to $7: the values of each shift, of two words $8, $9. $10 to $17: the scales of two shifts
    each in both halves, by word."""
    lines = [
        ".reg .b32 low, high, sign, size, v, z0, z1, z2, z3;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    lines += [
        f"prmt.b32 z{group}, ${10 + 2 * group}, ${11 + 2 * group}, 0x5410;" for group in range(4)
    ]
    for place in range(8):
        half, at = ("low", "high")[place // 4], 4 * (place % 4)
        lines += [
            _moved(half, 12 - at, "sign"),
            _moved(half, 6 - at, "size"),
            "and.b32 size, size, 0x01C001C0;",
            "lop3.b32 v, sign, 0x80008000, size, 0xEA;",
            f"mul.rn.bf16x2 ${place}, v, z{place // 2};",
        ]
    return "{ " + " ".join(lines) + " }"


_ASSEMBLY = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 10))


def _run_scale_bits(scales: tl.tensor, words: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 of words' shape: the group's scale as bfloat16 in both halves."""
    bits = ((scales >> (8 * GROUP)) & 255) << 7
    return tl.broadcast_to((bits | (bits << 16))[:, None], words.shape)


_scale_bits = triton.jit(_run_scale_bits)


def _run_fp4_value(
    words: tl.tensor,
    scales: tl.tensor,
    dtype: tl.constexpr,
    SHIFT: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One shift's, by arithmetic that any device has."""
    code = words >> (4 * SHIFT)
    exponent = (code >> 1) & 3
    half = (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << exponent).to(tl.float32) * 0.5)
    field = (scales >> (8 * (SHIFT // 2))) & 255
    scale = tl.exp2(field.to(tl.float32) - 253.0)
    return (tl.where((code & 8) == 0, size, -size) * scale[:, None]).to(dtype)


_fp4_value = triton.jit(_run_fp4_value)


def _run_fp4_values(
    words: tl.tensor,
    scales: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words), scales int32 (rows,) of a turn -> values by shift, 0 to 7, each
    (rows, words) of dtype. IS_PACKED: dtype is bfloat16 and this is a GPU from sm90 on."""
    if IS_PACKED:
        return tl.inline_asm_elementwise(
            _ASSEMBLY,
            _CONSTRAINTS,
            [
                words,
                _scale_bits(scales, words, 0),
                _scale_bits(scales, words, 1),
                _scale_bits(scales, words, 2),
                _scale_bits(scales, words, 3),
            ],
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
    else:  # noqa: RET505
        return (
            _fp4_value(words, scales, dtype, 0),
            _fp4_value(words, scales, dtype, 1),
            _fp4_value(words, scales, dtype, 2),
            _fp4_value(words, scales, dtype, 3),
            _fp4_value(words, scales, dtype, 4),
            _fp4_value(words, scales, dtype, 5),
            _fp4_value(words, scales, dtype, 6),
            _fp4_value(words, scales, dtype, 7),
        )


fp4_values = triton.jit(_run_fp4_values)
