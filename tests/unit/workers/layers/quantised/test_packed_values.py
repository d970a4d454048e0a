"""What the PTX over a word makes is what the values stand for."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.ptx_halves import run_integer_ptx, run_product_ptx, run_ptx
from workers.layers.formats.mxfp4 import dequantise_mxfp4
from workers.layers.kept.int4 import Int4Groups
from workers.layers.quantised import (
    fp4_values,
    fp8_values,
    int4_fragments,
    int4_values,
)

NUM = 500
PAIR_SHIFTS = [4 * pair + 16 * half for pair in range(4) for half in range(2)]


def words_of():
    return torch.randint(0, 1 << 32, (NUM,))


def in_both_halves(bits):
    return bits | bits << 16


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    ("base", "kind"),
    [(int4_values.BFLOAT16_BASE, "bf16x2"), (int4_values.FLOAT16_BASE, "f16x2")],
)
def test_integers_less_their_zeros(base, kind, half) -> None:
    word, zero = words_of(), torch.randint(0, 17, (NUM,))
    made = run_ptx(
        int4_values.assembly(base, kind, half), [word, in_both_halves(base | zero)], 4, kind
    )
    for value, shift in zip(made, PAIR_SHIFTS[4 * half :], strict=False):
        assert torch.equal(value, ((word >> shift & 15) - zero).double())


def test_four_bit_floats_times_their_scales() -> None:
    word = words_of()
    exponents = [torch.randint(60, 129, (NUM,)) for _ in range(4)]
    bits = [in_both_halves((one + 126) << 7) for one in exponents]
    made = run_ptx(fp4_values.assembly(), [word, *bits], 8, "bf16x2")
    for pair, scale in enumerate(bits):
        alone = run_ptx(fp4_values.pair_assembly(pair), [word, scale], 2, "bf16x2")
        assert all(map(torch.equal, alone, made[2 * pair : 2 * pair + 2]))
    for place, (value, shift) in enumerate(zip(made, PAIR_SHIFTS, strict=True)):
        codes = (word >> shift & 15).to(torch.uint8)
        blocks = codes[:, None, None].expand(NUM, 1, 16)
        scales = exponents[place // 2][:, None].to(torch.uint8)
        assert torch.equal(value, dequantise_mxfp4(blocks, scales)[:, 0].double())


def test_eight_bit_floats_are_themselves() -> None:
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values & 127 != 127]
    made = run_ptx(
        fp8_values.assembly(), [sum(values.roll(n).long() << 8 * n for n in range(4))], 4, "bf16x2"
    )
    for place, value in enumerate(made):
        want = values.roll(place).view(torch.float8_e4m3fn).double()
        assert torch.equal(value, want)


def fragments_of(x, words, zeros, half):
    """Inputs of a product of 16 rows and a turn of 128 columns, as int4_mma's lanes have them.

    x: (128,) of 16 bits; words: (16, 16), zeros: (16,), each row's."""
    lanes = torch.arange(32)
    rows, chunk = lanes // 4, lanes % 4
    pairs = x.view(torch.int16).long() & 0xFFFF
    pairs = (pairs[::2] | pairs[1::2] << 16).view(4, 16)
    own = [words[rows + further, 4 * chunk + n] for further in (0, 8) for n in range(4)]
    own += [pairs[quarter, 4 * chunk + n] for quarter in range(4) for n in range(4)]
    assembly = int4_fragments.zeros_assembly(half)
    for further in (0, 8):
        both = run_integer_ptx(assembly, [zeros[rows + further]], 2)
        own += [one & 0xFFFFFFFF for one in both]
    return own


@pytest.mark.parametrize("half", [int4_fragments.BFLOAT16, int4_fragments.FLOAT16])
def test_tensor_cores_take_words_and_a_row_as_lanes_have_them(half) -> None:
    """Exactly, in each column, and added to what was there."""
    dtype = torch.bfloat16 if half.name == "bf16" else torch.float16
    values = torch.randint(0, 16, (16, 128), dtype=torch.int32)
    zeros = torch.randint(0, 17, (16, 2), dtype=torch.int32)
    groups = torch.arange(128) // 64
    kept = Int4Groups.of(values, torch.ones(16, 2), zeros, groups)
    x = torch.randint(-128, 128, (128,)).to(dtype)
    words = kept.words.view(16, 16).long() & 0xFFFFFFFF
    inputs = fragments_of(x, words, kept.headers[:, 0, :, 0].flatten().long(), half)
    before = [torch.randn(32, dtype=torch.float64) for _ in range(8)]
    made = run_product_ptx(int4_fragments.products_assembly(half), [*inputs, *before], 8)
    unit = 2.0**-half.unit
    want = (kept.dequantised().double() * x.double()).view(16, 2, 64).sum(2) * unit
    rows = torch.arange(32) // 4
    for place, (got, added) in enumerate(zip(made, before, strict=True)):
        part, further = place // 4, place % 4 // 2 * 8
        assert torch.allclose(got - added, want[rows + further, part], rtol=0, atol=1e-9)
