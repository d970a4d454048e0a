"""Products with packed four-bit weights by Triton's interpreter, as interpreted_quantised.py has
those of other forms.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from functools import partial

import torch
from torch.nn.functional import gelu, silu

from tests.fakes.int4_weights import int4_weight, kept_of
from tests.fakes.interpreted_quantised import check_close, check_gemv_of_no_numbers
from workers.layers.quantised.int4_mma import int4_mma
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.int4_skinny import int4_skinny
from workers.layers.quantised.int4_spread import int4_spread
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import MmaTiles, SkinnyShape
from workers.layers.quantised.tile_table import TileRule


def check_int4(weight, num_tokens, num_splits):
    kept = kept_of(weight)
    assert torch.equal(kept.dequantised(), weight.dequantised())
    x = torch.randn(num_tokens, kept.in_features)
    ordered = x if kept.order is None else x.index_select(1, kept.order)
    want = x.double() @ weight.dequantised().double().t()
    shape = SkinnyShape(32, 16, kept.turn, num_splits, 1, 4)
    check_close(int4_skinny(ordered, kept, shape).double().sum(0), want, 1e-5)
    matrix = int4_spread(kept, torch.float32)
    check_close(ordered.double() @ matrix.double().t(), want, 1e-5)


def check_int4_mma(weight, shape, dtype):
    """x has numbers of sizes four powers of ten apart; parts are float32."""
    kept = kept_of(weight)
    bound = 1e-5 if shape.num_splits > 1 else 5e-3
    x = (torch.randn(1, kept.in_features) * torch.logspace(-2, 2, kept.in_features)).to(dtype)
    want = x.double() @ weight.dequantised().double().t()
    ordered = x if kept.order is None else x.index_select(1, kept.order)
    out = int4_mma(ordered, kept, shape)
    assert out.shape == (shape.num_splits, 1, kept.out_features)
    assert out.dtype == (dtype if shape.num_splits == 1 else torch.float32)
    check_close(out.double().sum(0), want, bound)
    check_gemv_of_no_numbers(lambda x, *_: int4_mma(x, kept, shape), ordered, shape)
    if shape.num_splits == 1:
        x = torch.randn(1, kept.in_features).to(dtype)
        ordered = x if kept.order is None else x.index_select(1, kept.order)
        gate, up = (x.double() @ weight.dequantised().double().t()).chunk(2, dim=1)
        for name, bent in (("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))):
            activated = int4_mma(ordered, kept, shape, gate=name)
            assert activated.shape == (1, 1, kept.out_features // 2)
            check_close(activated[0], bent(gate) * up, 2e-2)


def check_int4_mmas():
    """One tile and two, whole and not; turns that are held at once, twice and with some left; a
    scale a half turn, a turn and a row; columns in an order of their own; sums in chains."""
    bf16, fp16 = torch.bfloat16, torch.float16
    check_int4_mma(int4_weight(48, 1024, 128, False), SkinnyShape(16, 1, 512, 1, 4, 2), bf16)
    check_int4_mma(int4_weight(40, 1024, 128, False), SkinnyShape(32, 1, 512, 2, 4, 2), bf16)
    check_int4_mma(int4_weight(24, 1792, 256, False), SkinnyShape(16, 1, 256, 1, 3, 1), fp16)
    wide = int4_weight(24, 1024, 1024, False, has_half_scales=False)
    check_int4_mma(wide, SkinnyShape(16, 1, 256, 1, 2, 1), bf16)
    check_int4_mma(int4_weight(16, 384, 64, True), SkinnyShape(16, 1, 128, 1, 2, 1), bf16)
    short = int4_weight(48, 1024, 128, False, is_symmetric=True)
    check_int4_mma(short, SkinnyShape(16, 1, 512, 1, 4, 2), bf16)
    chained = SkinnyShape(32, 1, 512, 2, 4, 2, chains=2)
    check_int4_mma(int4_weight(40, 1024, 128, False), chained, bf16)
    check_int4_mma(int4_weight(16, 384, 64, True), SkinnyShape(16, 1, 128, 1, 2, 1, None, 2), bf16)


def check_mma_tiles():
    """Products by a table that has them, gated ones, too."""
    weight = int4_weight(64, 1024, 128, True)
    kept = kept_of(weight)
    table = (TileRule(1, MmaTiles(16, 1, 512, 8, 4, 2)),)
    product = Int4Product(kept, True, table, table)
    x = torch.randn(1, 1024).bfloat16()
    want = x.double() @ weight.dequantised().double().t()
    parts = product(x)
    assert parts.shape == (2, 1, 64)
    check_close(parts.double().sum(0), want, 1e-5)
    gate, up = want.chunk(2, dim=1)
    check_close(KeptGatedProduct(product, "silu")(x), silu(gate) * up, 2e-2)
    check_part_of_a_row()


def check_part_of_a_row():
    """x is a part of a wider row, which begins between two multiples of 16 bytes."""
    weight = int4_weight(32, 256, 128, False)
    product = Int4Product(kept_of(weight), False)
    x = torch.randn(1, 264).bfloat16()[:, 4:260]
    assert x.is_contiguous()
    assert torch.equal(product(x), product(x.clone()))
    gated = KeptGatedProduct(product, "silu")
    assert torch.equal(gated(x), gated(x.clone()))


if __name__ == "__main__":
    torch.manual_seed(0)
    check_int4(int4_weight(40, 512, 128, has_order=False), 3, 2)
    check_int4(int4_weight(40, 384, 64, has_order=True), 1, 1)
    check_int4(int4_weight(40, 384, 128, False, has_half_scales=False), 3, 1)
    check_int4(int4_weight(40, 512, 256, has_order=False), 19, 1)
    check_int4(int4_weight(40, 512, 128, False, is_symmetric=True), 3, 2)
    check_int4_mmas()
    check_mma_tiles()
    print("all equal")
