"""What the PTX over two words makes is what the values stand for."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.ptx_halves import run_ptx
from workers.layers.formats.mxfp4 import dequantise_mxfp4
from workers.layers.quantised import fp4_values, int4_values

NUM = 500


def words_of():
    return [torch.randint(0, 1 << 32, (NUM,)) for _ in range(2)]


def in_both_halves(bits):
    return bits | bits << 16


@pytest.mark.parametrize(
    ("base", "kind"),
    [(int4_values.BFLOAT16_BASE, "bf16x2"), (int4_values.FLOAT16_BASE, "f16x2")],
)
def test_integers_less_their_zeros(base, kind) -> None:
    words = words_of()
    zeros = [torch.randint(0, 17, (NUM,)) for _ in range(4)]
    bits = [in_both_halves(base | zero) for zero in zeros]
    made = run_ptx(int4_values.assembly(base, kind), [*words, *bits], 8, kind)
    for shift, halves in enumerate(made):
        for half, word in enumerate(words):
            zero = zeros[half + 2 * (shift // 4)]
            assert torch.equal(halves[half], ((word >> 4 * shift & 15) - zero).double())


def test_four_bit_floats_times_their_scales() -> None:
    words = words_of()
    exponents = [torch.randint(60, 129, (NUM,)) for _ in range(8)]
    bits = [in_both_halves((one + 126) << 7) for one in exponents]
    made = run_ptx(fp4_values._assembly(), [*words, *bits], 8, "bf16x2")
    for shift, halves in enumerate(made):
        for half, word in enumerate(words):
            codes = (word >> 4 * shift & 15).to(torch.uint8)
            exponent = exponents[2 * (shift // 2) + half]
            blocks = codes[:, None, None].expand(NUM, 1, 16)
            want = dequantise_mxfp4(blocks, exponent[:, None].to(torch.uint8))[:, 0]
            assert torch.equal(halves[half], want.double())
