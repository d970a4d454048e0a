"""Products with kept weights by Triton's interpreter, against what they keep, dequantised.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from functools import partial

import torch
from torch.nn.functional import gelu, silu

from tests.fakes.interpreted_carry import carry_into_exponents
from workers.layers.cuda.expert_routing import counted
from workers.layers.formats.mxfp4 import dequantise_mxfp4
from workers.layers.formats.scaled import FP8
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_products import kept_partial_products
from workers.layers.quantised.expert_spread import spread
from workers.layers.quantised.fp8_gemv import fp8_gemv
from workers.layers.quantised.fp8_mapped import fp8_mapped
from workers.layers.quantised.fp8_rounded import fp8_rounded
from workers.layers.quantised.fp8_rounding import round_groups, round_rows
from workers.layers.quantised.skinny_shape import (
    SkinnyShape,
)
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch

CPU = torch.device("cpu")


def check_close(got, want, bound):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, float(error)


def fp8_values(*shape):
    return (torch.randn(shape) * 64).clamp(-448, 448).to(FP8)


def check_rounded_skinny(multiply, kept, num_tokens, num_splits, block_rows=32):
    """Exact of four bits by a power of two that a token has for each 128 columns; of others within
    what E4M3's three bits leave."""
    shape = SkinnyShape(block_rows, 16, min(128, kept.in_features // num_splits), num_splits, 1, 4)
    powers = torch.randint(-90, 60, (num_tokens, kept.in_features // 128, 1)).float().exp2()
    exact = torch.randint(-15, 16, (num_tokens, kept.in_features // 128, 128)) * powers
    exact[0, 0] = 0.0
    others = torch.randn(num_tokens, kept.in_features)
    for x, bound in ((exact.flatten(1), 1e-5), (others, 0.06)):
        out = multiply(x, kept.values, kept.scales, shape)
        assert out.shape == (num_splits, num_tokens, kept.out_features)
        want = x.double() @ kept.dequantised().double().t()
        for row, wanted in zip(out.double().sum(0), want, strict=True):
            check_close(row, wanted, bound)
        half = multiply(x.bfloat16(), kept.values, kept.scales, shape)
        assert half.dtype == (torch.bfloat16 if num_splits == 1 else torch.float32)
        check_close(half.double().sum(0), want, bound + 5e-3)


def check_rows_apart(multiply, kept):
    """What is no finite number in one row is in no other row's product, and in its own."""
    shape = SkinnyShape(32, 16, 128, 2, 1, 4)
    x = torch.randn(18, kept.in_features)
    apart = multiply(x, kept.values, kept.scales, shape).sum(0)
    x[3, 130], x[17] = torch.inf, torch.nan
    out = multiply(x, kept.values, kept.scales, shape).sum(0)
    others = [row for row in range(18) if row not in (3, 17)]
    assert torch.equal(out[others], apart[others])
    assert not out[3].isfinite().any()


def check_gemv(multiply, kept, shape, bound):
    """multiply: of x and whether there is a gate. x has numbers of every size, 0 in some places."""
    x = torch.randn(1, kept.in_features) * torch.logspace(-8, 4, kept.in_features)
    x = x.bfloat16().float()
    x[0, : kept.in_features // 4] = 0.0
    want = x.double() @ kept.dequantised().double().t()
    out = multiply(x, shape, None)
    assert out.shape == (shape.num_splits, 1, kept.out_features)
    check_close(out.double().sum(0), want, bound)
    halved = multiply(x.bfloat16(), shape, None)
    assert halved.dtype == (torch.bfloat16 if shape.num_splits == 1 else torch.float32)
    check_close(halved.double().sum(0), want, 5e-3)
    if shape.num_splits == 1:
        check_gemv_of_no_numbers(multiply, x, shape)
        # A gate near 0 is bent by its own error: of numbers of one size that is small.
        x = torch.randn(1, kept.in_features)
        gate, up = (x.double() @ kept.dequantised().double().t()).chunk(2, dim=1)
        for name, bent in (("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))):
            activated = multiply(x, shape, name)
            assert activated.shape == (1, 1, kept.out_features // 2)
            check_close(activated[0], bent(gate) * up, 10 * bound)


def check_gemv_of_no_numbers(multiply, x, shape):
    for odd in (torch.nan, torch.inf, -torch.inf):
        there = x.clone()
        there[0, -3] = odd
        assert not multiply(there, shape, None).sum(0).isfinite().any()


def check_fp8_gemv(kept, shape):
    check_gemv(
        lambda x, shape, gate: fp8_gemv(x, kept.values, kept.scales, shape, gate=gate),
        kept,
        shape,
        1e-5,
    )


def check_gemvs():
    rows = Fp8Rows(fp8_values(48, 512), torch.rand(48) * 1e-3)
    blocks = Fp8Blocks(fp8_values(256, 512), torch.rand(2, 4) * 1e-3)
    check_fp8_gemv(rows, SkinnyShape(32, 1, 128, 2, 1, 4))
    check_fp8_gemv(rows, SkinnyShape(32, 1, 256, 1, 1, 4))
    for num_splits in (2, 1):
        check_fp8_gemv(blocks, SkinnyShape(64, 1, 256, num_splits, 1, 4))


def fp4_stack(num, rows, columns):
    stack = Fp4Stack(num, rows, columns, CPU)
    for place in range(num):
        blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 127, (rows, columns // 32), dtype=torch.uint8)
        assert stack.take(place, slice(0, rows), blocks, scales)
        assert torch.equal(stack.dequantised()[place], dequantise_mxfp4(blocks, scales))
    return stack


def fp8_stack(num, rows, columns):
    stack = Fp8Stack(num, rows, columns, CPU)
    for place in range(num):
        scales = torch.rand(rows // 128, columns // 128) * 1e-3
        stack.take(place, 0, fp8_values(rows, columns), scales)
    return stack


def check_experts(stack, hidden_size, width, gating, has_bias):
    gate_up, down = stack(4, 2 * width, hidden_size), stack(4, hidden_size, width)
    biases = (torch.randn(4, 2 * width), torch.randn(4, hidden_size)) if has_bias else (None, None)
    kept = KeptExperts(gate_up, down, gating, *biases)
    plain = RoutedWeights(gate_up.dequantised(), down.dequantised(), gating, *biases)
    x, weights = torch.randn(5, hidden_size), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0]], dtype=torch.int32)
    chosen = counted(weights, ids, 4)
    parts = kept_partial_products(x, chosen, kept)
    check_close(parts.sum(0), routed_in_torch(x, ids, weights, plain), 1e-5)


def check_rounded_experts(hidden_size, width):
    gate_up, down = fp8_stack(4, 2 * width, hidden_size), fp8_stack(4, hidden_size, width)
    plain = RoutedWeights(gate_up.dequantised(), down.dequantised(), SILU)
    x, weights = torch.randn(5, hidden_size), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0]], dtype=torch.int32)
    kept = KeptExperts(gate_up, down, SILU, None, None)
    parts = RoundedTiles(16, 1, 4).products(x, counted(weights, ids, 4), kept, 1)
    # Activations are rounded to three bits twice.
    check_close(parts.sum(0), routed_in_torch(x, ids, weights, plain), 0.08)


def check_spread(stack):
    """MXFP4 is exact in float32, FP8 rounded once."""
    assert torch.equal(spread(stack, torch.float32), stack.dequantised())


def check_rounding(num_rows, num_columns):
    """Within half a step of E4M3's three bits, or of its least one."""
    x = torch.randn(num_rows, num_columns) * torch.logspace(-3, 3, num_rows).unsqueeze(1)
    x[0, :] = 0.0
    for size, rounded in ((num_columns, round_rows(x)), (128, round_groups(x))):
        scales = rounded.scales[:num_rows]
        assert rounded.scales.stride(0) == 1
        spread = scales.repeat_interleave(size, 1)[:, :num_columns]
        error = (rounded.values[:num_rows].float() * spread - x).abs()
        assert (error <= x.abs() / 16 * 1.01 + spread * 2**-10 * 1.01).all()
        largest = x.abs().unflatten(1, (-1, size)).amax(2)
        assert torch.allclose(scales, largest.clamp(min=1e-12) / 448.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    carry_into_exponents()
    rows = Fp8Rows(fp8_values(80, 256), torch.rand(80) * 1e-3)
    blocks = Fp8Blocks(fp8_values(256, 256), torch.rand(2, 2) * 1e-3)
    for num_tokens, num_splits in ((1, 2), (5, 1), (19, 1)):
        for multiply in (fp8_rounded, fp8_mapped):
            check_rounded_skinny(multiply, rows, num_tokens, num_splits)
            check_rounded_skinny(multiply, blocks, num_tokens, num_splits, block_rows=128)
        # Several programs of one block of scales.
        check_rounded_skinny(fp8_rounded, blocks, num_tokens, num_splits)
    check_rounded_skinny(fp8_mapped, blocks, 19, 1)
    for multiply in (fp8_rounded, fp8_mapped):
        check_rows_apart(multiply, rows)
        check_rows_apart(multiply, blocks)
    check_gemvs()
    check_experts(fp4_stack, 160, 64, Gating(1.702, 7.0), has_bias=True)
    check_experts(fp8_stack, 128, 128, SILU, has_bias=False)
    check_rounded_experts(256, 128)
    check_spread(fp4_stack(2, 80, 160))
    check_spread(fp8_stack(2, 128, 256))
    check_rounding(5, 384)
    print("all equal")
