"""FP8 (E4M3) in registers, as bfloat16, exactly.

A byte's seven bits of magnitude at the border of bfloat16's exponent and mantissa are the value
times 2**-120, E4M3's subnormals included, and a multiplication makes it whole: no conversion, which
GPUs have at a quarter of the rate of these or less. Four bytes of a word make two registers of two
halves each; PTX, because Triton has no such halves. Knows no product.
"""

import triton
import triton.language as tl

from workers.layers.quantised.tiles import joined

_UNSCALE = tl.constexpr(2.0**120)
_UNSCALE_BITS = 0x7B807B80
"""2**120 as bfloat16, in both halves."""
_FLOAT32_SHIFT = tl.constexpr(20)
"""From E4M3's bits to the border of float32's exponent and mantissa, whose bias is bfloat16's."""


def assembly() -> str:
    """$0, $1 and $2, $3: the word $4's bytes from the lowest on, as bfloat16."""
    lines = [".reg .b32 high, size, scale;", f"mov.b32 scale, {_UNSCALE_BITS:#x};"]
    for first, selector in ((0, 0x1404), (2, 0x3424)):
        lines += [
            f"prmt.b32 high, $4, 0, {selector:#x};",
            "shr.u32 size, high, 4;",
            "and.b32 size, size, 0x07F007F0;",
            "lop3.b32 size, high, 0x80008000, size, 0xEA;",
            "mul.rn.bf16x2 size, size, scale;",
            f"mov.b32 {{${first}, ${first + 1}}}, size;",
        ]
    return "{ " + " ".join(lines) + " }"


_ASSEMBLY = tl.constexpr(assembly())
_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,r")


def _run_any_value(words: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:  # noqa: N803
    """One place's, by arithmetic that any device has, in float32."""
    code = words >> (8 * PLACE)
    size = ((code & 127) << _FLOAT32_SHIFT).to(tl.float32, bitcast=True) * _UNSCALE
    return tl.where((code & 128) == 0, size, -size)


_any_value = triton.jit(_run_any_value)


def _run_fp8_pairs(
    words: tl.tensor,
    dtype: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """words int32 (rows, words), each of four neighbouring columns -> their first two columns and
    their last two, each (rows, 2 * words) of dtype. IS_PACKED: dtype is bfloat16 and
    this is a GPU; else it is float32."""
    if IS_PACKED:
        a, b, c, d = tl.inline_asm_elementwise(
            _ASSEMBLY,
            _CONSTRAINTS,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
        return joined(a, b), joined(c, d)
    else:  # noqa: RET505 - Triton takes one of branches that all return
        return (
            joined(_any_value(words, 0), _any_value(words, 1)).to(dtype),
            joined(_any_value(words, 2), _any_value(words, 3)).to(dtype),
        )


fp8_pairs = triton.jit(_run_fp8_pairs)


def _run_pair_columns(WORDS: tl.constexpr) -> tl.tensor:  # noqa: N803
    """int32 (2 * WORDS,): columns of the first pairs; those of the last are two further on."""
    places = tl.arange(0, 2 * WORDS)
    # Two of them lie side by side: asynchronous copies take no less than four bytes.
    return tl.max_contiguous(tl.multiple_of(places // 2 * 4 + places % 2, 2), 2)


pair_columns = triton.jit(_run_pair_columns)
