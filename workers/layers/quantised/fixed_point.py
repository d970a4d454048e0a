"""x as integers of 16 bits by a power of two a group of columns, and four-bit weights times them.

A power of two that leaves 15 bits for the largest magnitude keeps all bits of bfloat16's numbers
down to 1/128 of it; of smaller ones what is less than 2**-15 of the largest is lost. Products and
their sums over a group are exact: dp2a multiplies two integers of 16 bits by two of 8 and adds both
to one of 32. PTX, because Triton has no such products. Knows no kernel.
"""

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_EXPONENT_SHIFT = tl.constexpr(23)
_NOT_FINITE = tl.constexpr(255)
_LARGEST_BITS = tl.constexpr(14)
"""2**14 is at most the largest magnitude's integer, which is below 2**15."""
_LARGEST = tl.constexpr(32767)
_INTEGER_BASE = tl.constexpr(12582912.0)
_INTEGER_BASE_BITS = tl.constexpr(0x4B400000)
"""1.5 * 2**23: in a sum with it float32's last bits are the other number's integer."""


def assembly() -> str:
    """$0, $1: sums of the products of word $2's first and last two pairs of values with the pairs
    $3, $4 and $5, $6 of integers of 16 bits, as kept/int4.py packs words. Bytes of even and odd
    hold two pairs each, by turns."""
    return " ".join(
        [
            "{ .reg .b32 even, odd, bytes;",
            "and.b32 even, $2, 0x0F0F0F0F;",
            "shr.u32 odd, $2, 4;",
            "and.b32 odd, odd, 0x0F0F0F0F;",
            "prmt.b32 bytes, even, odd, 0x6420;",
            "dp2a.lo.s32.u32 $0, $3, bytes, 0;",
            "dp2a.hi.s32.u32 $0, $4, bytes, $0;",
            "prmt.b32 bytes, even, odd, 0x7531;",
            "dp2a.lo.s32.u32 $1, $5, bytes, 0;",
            "dp2a.hi.s32.u32 $1, $6, bytes, $1; }",
        ]
    )


_ASSEMBLY = tl.constexpr(assembly())
_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r,r,r,r")


def _run_float_pair(
    x: tl.tensor,
    pairs: tl.tensor,
    TURNS: tl.constexpr,  # noqa: N803
    CHUNKS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Elements 2 * pairs and the next of x, as float32 (turns, chunks, words a chunk). Those of 16
    bits come by one load."""
    size: tl.constexpr = (TURNS, CHUNKS, pairs.shape[0] // (TURNS * CHUNKS))
    dtype: tl.constexpr = x.dtype.element_ty
    if dtype == tl.float32:
        low, high = tl.load(x + 2 * pairs), tl.load(x + 2 * pairs + 1)
        return tl.reshape(low, size), tl.reshape(high, size)
    else:  # noqa: RET505 - Triton takes one of branches that all return
        both = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + pairs)
        both = tl.reshape(both, size)
        if dtype == tl.bfloat16:
            low = (both << 16).to(tl.float32, bitcast=True)
            return low, (both & -65536).to(tl.float32, bitcast=True)
        else:  # noqa: RET505
            low = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            return low, (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


float_pair = triton.jit(_run_float_pair)


def _run_magnitude(value: tl.tensor) -> tl.tensor:
    """float32 -> int32 that are in the order of magnitudes, what is no number being the largest."""
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


magnitude = triton.jit(_run_magnitude)


def _run_powers(largest: tl.tensor) -> tl.tensor:
    """largest: of a group's magnitudes -> float32: what its numbers are multiplied by to become
    integers, and what these are then to be multiplied by: NaN where one was not finite."""
    exponent = tl.maximum(largest >> _EXPONENT_SHIFT, _LARGEST_BITS + 1)
    up = ((254 + _LARGEST_BITS) - exponent) << _EXPONENT_SHIFT
    down = (exponent - _LARGEST_BITS) << _EXPONENT_SHIFT
    down = tl.where(exponent == _NOT_FINITE, 0x7FC00000, down)
    return up.to(tl.float32, bitcast=True), down.to(tl.float32, bitcast=True)


powers = triton.jit(_run_powers)


def _run_integer(value: tl.tensor, up: tl.tensor) -> tl.tensor:
    """int32: value * up, rounded to the nearest of 16 bits."""
    shifted = value * up + _INTEGER_BASE
    # float32 may come to be rounded up to 2**15; what has 16 bits of its own does not.
    return tl.minimum(shifted.to(tl.int32, bitcast=True) - _INTEGER_BASE_BITS, _LARGEST)


integer = triton.jit(_run_integer)


def _run_packed(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Integers of 16 bits in one of 32."""
    return (low & 0xFFFF) | (high << 16)


packed = triton.jit(_run_packed)


def _run_any_products(word: tl.tensor, pairs: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:  # noqa: N803
    low, high = (pairs << 16) >> 16, pairs >> 16
    return (word >> SHIFT & 15) * low + (word >> (SHIFT + 16) & 15) * high


_any_products = triton.jit(_run_any_products)


def _run_half_sums(
    words: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """int32 words and four packed pairs for each, one of every quarter of its turn -> the sums of
    its products in the turn's first half and in its second. IS_PACKED: this is a GPU."""
    if IS_PACKED:
        low, high = tl.inline_asm_elementwise(
            _ASSEMBLY,
            _CONSTRAINTS,
            [words, first, second, third, fourth],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return low, high
    else:  # noqa: RET505
        return (
            _any_products(words, first, 0) + _any_products(words, second, 4),
            _any_products(words, third, 8) + _any_products(words, fourth, 12),
        )


half_sums = triton.jit(_run_half_sums)
