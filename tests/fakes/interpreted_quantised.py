"""Products with kept weights by Triton's interpreter, against what they keep, dequantised.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import gelu, silu
from triton.runtime import interpreter

from tests.fakes.interpreted_carry import carry_into_exponents
from workers.layers.cuda.expert_routing import counted
from workers.layers.formats.grouped import GroupedWeight
from workers.layers.formats.mxfp4 import dequantise_mxfp4
from workers.layers.formats.scaled import FP8
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.kept.int4 import Int4Groups
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised import int4_products
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_products import kept_partial_products
from workers.layers.quantised.expert_spread import spread
from workers.layers.quantised.fp8_gemv import fp8_gemv
from workers.layers.quantised.fp8_mapped import fp8_mapped
from workers.layers.quantised.fp8_rounded import fp8_rounded
from workers.layers.quantised.fp8_rounding import round_groups, round_rows
from workers.layers.quantised.int4_mma import int4_mma
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.int4_resident import int4_resident
from workers.layers.quantised.int4_skinny import int4_skinny
from workers.layers.quantised.int4_spread import int4_spread
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import (
    MmaTiles,
    ResidentShape,
    ResidentTiles,
    SkinnyShape,
)
from workers.layers.quantised.tile_table import TileRule
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


def int4_weight(num_rows, num_columns, group_size, has_order):
    groups = torch.arange(num_columns) // group_size
    shape = num_rows, num_columns // group_size
    return GroupedWeight(
        torch.randint(0, 16, (num_rows, num_columns), dtype=torch.int32),
        torch.rand(shape) * 0.01,
        torch.randint(0, 17, shape, dtype=torch.int32),
        groups[torch.randperm(num_columns)] if has_order else groups,
    )


def check_int4(weight, num_tokens, num_splits):
    kept = Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)
    assert torch.equal(kept.dequantised(), weight.dequantised())
    x = torch.randn(num_tokens, kept.in_features)
    ordered = x if kept.order is None else x.index_select(1, kept.order)
    want = x.double() @ weight.dequantised().double().t()
    shape = SkinnyShape(32, 16, kept.turn, num_splits, 1, 4)
    check_close(int4_skinny(ordered, kept, shape).double().sum(0), want, 1e-5)
    matrix = int4_spread(kept, torch.float32)
    check_close(ordered.double() @ matrix.double().t(), want, 1e-5)


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


def check_int4_mma(weight, shape, dtype):
    """x has numbers of sizes four powers of ten apart; parts are float32."""
    kept = Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)
    multiply = int4_resident if isinstance(shape, ResidentShape) else int4_mma
    bound = 1e-5 if shape.num_splits > 1 else 5e-3
    x = (torch.randn(1, kept.in_features) * torch.logspace(-2, 2, kept.in_features)).to(dtype)
    want = x.double() @ weight.dequantised().double().t()
    ordered = x if kept.order is None else x.index_select(1, kept.order)
    out = multiply(ordered, kept, shape)
    assert out.shape == (shape.num_splits, 1, kept.out_features)
    assert out.dtype == (dtype if shape.num_splits == 1 else torch.float32)
    check_close(out.double().sum(0), want, bound)
    check_gemv_of_no_numbers(lambda x, *_: multiply(x, kept, shape), ordered, shape)
    if shape.num_splits == 1:
        x = torch.randn(1, kept.in_features).to(dtype)
        ordered = x if kept.order is None else x.index_select(1, kept.order)
        gate, up = (x.double() @ weight.dequantised().double().t()).chunk(2, dim=1)
        for name, bent in (("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))):
            activated = multiply(ordered, kept, shape, gate=name)
            assert activated.shape == (1, 1, kept.out_features // 2)
            check_close(activated[0], bent(gate) * up, 2e-2)


def check_int4_mmas():
    """One tile and two, whole and not; turns that are held at once, twice and with some left; a
    scale a half turn, a turn and a row; columns in an order of their own; sums in chains."""
    bf16, fp16 = torch.bfloat16, torch.float16
    check_int4_mma(int4_weight(48, 1024, 128, False), SkinnyShape(16, 1, 512, 1, 4, 2), bf16)
    check_int4_mma(int4_weight(40, 1024, 128, False), SkinnyShape(32, 1, 512, 2, 4, 2), bf16)
    check_int4_mma(int4_weight(24, 1792, 256, False), SkinnyShape(16, 1, 256, 1, 3, 1), fp16)
    check_int4_mma(int4_weight(26, 1024, 1024, False), SkinnyShape(16, 1, 256, 1, 2, 1), bf16)
    check_int4_mma(int4_weight(16, 384, 64, True), SkinnyShape(16, 1, 128, 1, 2, 1), bf16)
    chained = SkinnyShape(32, 1, 512, 2, 4, 2, chains=2)
    check_int4_mma(int4_weight(40, 1024, 128, False), chained, bf16)
    check_int4_mma(int4_weight(16, 384, 64, True), SkinnyShape(16, 1, 128, 1, 2, 1, None, 2), bf16)


def check_int4_residents():
    """Programs of two blocks and of three, held one at a time, two and more than there are; rows
    that end within a block, of pairs, too; one tile and two; a program for each block."""
    bf16, fp16 = torch.bfloat16, torch.float16

    def check(rows, columns, group_size, dtype, *shape, chains, programs):
        made = ResidentShape(*shape, chains=chains, programs=programs)
        check_int4_mma(int4_weight(rows, columns, group_size, False), made, dtype)

    check(80, 1024, 128, bf16, 16, 1, 512, 1, 2, 2, chains=1, programs=2)
    check(72, 1024, 128, bf16, 16, 1, 512, 1, 4, 2, chains=2, programs=2)
    check(104, 1024, 1024, fp16, 32, 1, 512, 1, 2, 2, chains=2, programs=3)
    check(58, 384, 64, bf16, 16, 1, 128, 1, 6, 1, chains=2, programs=1)
    check(48, 512, 256, bf16, 16, 1, 256, 1, 6, 1, chains=1, programs=3)
    with programs_reversed():
        check(96, 1024, 128, bf16, 16, 1, 512, 1, 4, 2, chains=1, programs=2)


@contextmanager
def programs_reversed():
    """The last one runs first, as it may: what one writes to another's place is seen then."""
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: begin(builder.grid_dim[0] - 1 - x, y, z)
    try:
        yield
    finally:
        builder.set_grid_idx = begin


def check_mma_tiles():
    """Products by a table that has them, gated ones, too."""
    weight = int4_weight(64, 1024, 128, True)
    kept = Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups)
    table = (TileRule(1, MmaTiles(16, 1, 512, 8, 4, 2)),)
    product = Int4Product(kept, True, table, table)
    x = torch.randn(1, 1024).bfloat16()
    want = x.double() @ weight.dequantised().double().t()
    residents = ResidentTiles(16, 1, 512, 1, num_stages=2, num_warps=2, programs=2)
    stays = Int4Product(kept, True, (TileRule(1, residents),), (TileRule(1, residents),))
    took, multiply = [], int4_products.int4_resident

    def noted(x, kept, shape, *others):
        took.append(type(shape))
        return multiply(x, kept, shape, *others)

    int4_products.int4_resident = noted
    check_close(stays(x)[0], want, 5e-3)
    gated = [KeptGatedProduct(one, "silu")(x) for one in (product, stays)]
    assert torch.equal(*gated)
    assert took == [ResidentShape] * 2
    int4_products.int4_resident = multiply
    parts = product(x)
    assert parts.shape == (2, 1, 64)
    check_close(parts.double().sum(0), want, 1e-5)
    gate, up = want.chunk(2, dim=1)
    check_close(KeptGatedProduct(product, "silu")(x), silu(gate) * up, 2e-2)
    check_part_of_a_row()


def check_part_of_a_row():
    """x is a part of a wider row, which begins between two multiples of 16 bytes."""
    weight = int4_weight(32, 256, 128, False)
    product = Int4Product(
        Int4Groups.of(weight.values, weight.scales, weight.zeros, weight.groups), False
    )
    x = torch.randn(1, 264).bfloat16()[:, 4:260]
    assert x.is_contiguous()
    assert torch.equal(product(x), product(x.clone()))
    gated = KeptGatedProduct(product, "silu")
    assert torch.equal(gated(x), gated(x.clone()))


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
    check_int4(int4_weight(40, 512, 128, has_order=False), 3, 2)
    check_int4(int4_weight(40, 384, 64, has_order=True), 1, 1)
    check_int4(int4_weight(40, 512, 256, has_order=False), 19, 1)
    check_gemvs()
    check_int4_mmas()
    check_int4_residents()
    check_mma_tiles()
    check_experts(fp4_stack, 160, 64, Gating(1.702, 7.0), has_bias=True)
    check_experts(fp8_stack, 128, 128, SILU, has_bias=False)
    check_rounded_experts(256, 128)
    check_spread(fp4_stack(2, 80, 160))
    check_spread(fp8_stack(2, 128, 256))
    check_rounding(5, 384)
    print("all equal")
