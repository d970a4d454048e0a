"""Four-bit integers in registers, as the input's dtype and less their zeros.

bfloat16 has the integers from 128 to 255 exactly, its last bits being theirs: 0x4300 with a value
in them is 128 and that value. The same in two halves of a register at once, over all eight values
of two words, takes a few instructions; PTX, because Triton has no such halves. Knows no product.
"""

import triton
import triton.language as tl

_SHIFTED = "shr.u32 s, {half}, {shift};"
_VALUE = "lop3.b32 v, {source}, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 ${out}, v, {zero};"


def _assembly() -> str:
    """$0 to $7: the values of each shift, of two words $8, $9. $10, $11: bits of 128 + zero of the
    first four in both halves, by word; $12, $13: of the last four."""
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
            lines.append(_SHIFTED.format(half=half, shift=shift))
        lines.append(_VALUE.format(source="s" if shift else half, out=place, zero=half + "z"))
    return "{ " + " ".join(lines) + " }"


_ASSEMBLY = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))


def _run_int4_values(
    words: tl.tensor,
    low_zeros: tl.tensor,
    high_zeros: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words) -> values less zeros by shift, 0 to 7, each (rows, words) of dtype.
    low_zeros: int32 (rows,), of the first four; high_zeros: of the others. IS_PACKED: dtype is
    bfloat16 and this is a GPU from sm90 on."""
    if IS_PACKED:
        low = tl.broadcast_to(((low_zeros | 0x4300) * 0x10001)[:, None], words.shape)
        high = tl.broadcast_to(((high_zeros | 0x4300) * 0x10001)[:, None], words.shape)
        return tl.inline_asm_elementwise(
            _ASSEMBLY,
            _CONSTRAINTS,
            [words, low, high],
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


int4_values = triton.jit(_run_int4_values)
