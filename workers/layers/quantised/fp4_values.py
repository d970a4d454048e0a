"""MXFP4 in registers, as the input's dtype and times its scale, exactly.

A value's three bits of magnitude at the border of bfloat16's exponent and mantissa are the value
times 2**-126, zero and one half included; the scale, which a stack keeps times 2**126, makes it
whole. PTX, as for four-bit integers: a word's pairs in two halves of a register. Knows no product.
"""

import triton
import triton.language as tl

from workers.layers.quantised.tiles import joined


def _moved(word: str, bits: int, out: str) -> str:
    """To the left by bits; to the right where they are negative."""
    kind = "shl.b32" if bits >= 0 else "shr.u32"
    return f"{kind} {out}, {word}, {abs(bits)};"


def _pair_lines(pair: int, word: str, scale: str, out: str) -> list[str]:
    """out: where the pair of the word goes, a register or two halves of one in braces."""
    return [
        _moved(word, 12 - 4 * pair, "sign"),
        _moved(word, 6 - 4 * pair, "size"),
        "and.b32 size, size, 0x01C001C0;",
        "lop3.b32 v, sign, 0x80008000, size, 0xEA;",
        f"mul.rn.bf16x2 v, v, {scale};",
        f"mov.b32 {out}, v;",
    ]


def _block(lines: list[str]) -> str:
    return "{ " + " ".join([".reg .b32 sign, size, v;", *lines]) + " }"


def assembly() -> str:
    """$0, $1 to $6, $7: the four pairs of the word $8. $9 to $12: their scales, each in both
    halves."""
    outs = [f"{{${2 * pair}, ${2 * pair + 1}}}" for pair in range(4)]
    lines = [_pair_lines(pair, "$8", f"${9 + pair}", out) for pair, out in enumerate(outs)]
    return _block(sum(lines, []))


def pair_assembly(pair: int) -> str:
    """$0, $1: one pair of the word $2. $3: its scale, in both halves."""
    return _block(_pair_lines(pair, "$2", "$3", "{$0, $1}"))


_ASSEMBLY = tl.constexpr(assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 5))


def _run_scale_bits(scales: tl.tensor, words: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 of words' shape: the group's scale as bfloat16 in both halves."""
    bits = ((scales >> (8 * GROUP)) & 255) << 7
    return tl.broadcast_to((bits | (bits << 16))[:, None], words.shape)


_scale_bits = triton.jit(_run_scale_bits)


def _run_fp4_value(
    words: tl.tensor,
    scales: tl.tensor,
    dtype: tl.constexpr,
    PAIR: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One of a pair's, by arithmetic that any device has."""
    code = words >> (4 * PAIR + 16 * HALF)
    exponent = (code >> 1) & 3
    half = (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << exponent).to(tl.float32) * 0.5)
    field = (scales >> (8 * PAIR)) & 255
    scale = tl.exp2(field.to(tl.float32) - 253.0)
    return (tl.where((code & 8) == 0, size, -size) * scale[:, None]).to(dtype)


_fp4_value = triton.jit(_run_fp4_value)


def _run_fp4_values(
    words: tl.tensor,
    scales: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words), scales int32 (rows,) of a turn -> values of each quarter of its
    columns, (rows, 2 * words) of dtype. IS_PACKED: dtype is bfloat16 and this is a GPU from sm90
    on."""
    if IS_PACKED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
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
            pack=1,
        )
        return joined(a, b), joined(c, d), joined(e, f), joined(g, h)
    else:  # noqa: RET505
        return (
            joined(_fp4_value(words, scales, dtype, 0, 0), _fp4_value(words, scales, dtype, 0, 1)),
            joined(_fp4_value(words, scales, dtype, 1, 0), _fp4_value(words, scales, dtype, 1, 1)),
            joined(_fp4_value(words, scales, dtype, 2, 0), _fp4_value(words, scales, dtype, 2, 1)),
            joined(_fp4_value(words, scales, dtype, 3, 0), _fp4_value(words, scales, dtype, 3, 1)),
        )


fp4_values = triton.jit(_run_fp4_values)
