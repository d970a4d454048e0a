"""Which FP8 weights are kept, and what their products hand to the libraries' kernels.

Kernels of Triton and of sglang-kernel are written anew in torch, by their signatures.
"""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.errors import ConfigError
from workers.layers.formats.format import Cut
from workers.layers.formats.scaled import FP8, RoundedToFp8, Scaled
from workers.layers.formats.scaling import PerBlock, PerChannel, PerTensor
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.kept.weight import join_kept
from workers.layers.quantised import fp8_products
from workers.layers.quantised import product as product_module
from workers.layers.quantised.fp8_gemv import fp8_gemv
from workers.layers.quantised.fp8_mapped import fp8_mapped
from workers.layers.quantised.fp8_products import Fp8BlockProduct, Fp8RowProduct
from workers.layers.quantised.fp8_rounded import fp8_rounded
from workers.layers.quantised.fp8_rounding import Rounded
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.products import kept_product
from workers.layers.quantised.skinny_shape import (
    GemvTiles,
    MappedSkinnyTiles,
    MmaTiles,
    RoundedSkinnyTiles,
    SkinnyShape,
    SkinnyTiles,
)
from workers.layers.quantised.tile_table import (
    FP8_BLOCKS,
    FP8_GATED,
    FP8_ROWS,
    INT4,
    INT4_GATED,
    TileRule,
    tiles_for,
)

WHOLE = Cut((256, 384), slice(0, 256), slice(0, 384))
FEW = 1
MANY = 1 + max(rule.max_rows for rule in (*FP8_ROWS, *FP8_BLOCKS))


def values_of(*shape):
    return (torch.randn(shape) * 64).clamp(-448, 448).to(FP8)


def stored(scaling):
    scales = torch.rand(scaling.shape(WHOLE.whole)) * 1e-3
    return {"weight": values_of(*WHOLE.whole), "weight_scale": scales}


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [(PerTensor(), Fp8Rows), (PerChannel(), Fp8Rows), (PerBlock(128, 128), Fp8Blocks)],
)
def test_what_is_kept_stands_for_the_same(scaling, kind) -> None:
    weight_format, tensors = Scaled(FP8, scaling), stored(scaling)
    kept = weight_format.kept(tensors, WHOLE)
    assert type(kept) is kind
    assert torch.equal(kept.dequantised(), weight_format.dequantise(tensors, WHOLE))
    assert kept.is_finite()
    twice = join_kept([kept, kept], torch.bfloat16)
    assert torch.equal(twice.dequantised(), kept.dequantised().repeat(2, 1))
    for scale in (torch.inf, torch.nan, 1e38):
        kept.scales[0] = scale
        assert not kept.is_finite()


def test_a_block_may_be_larger_than_its_matrix() -> None:
    scaling = PerBlock(1 << 40, 1 << 40)
    tensors = stored(scaling)
    want = tensors["weight"].float() * tensors["weight_scale"]
    assert torch.equal(Scaled(FP8, scaling).dequantise(tensors, WHOLE), want)


def test_a_plain_matrix_is_kept_rounded() -> None:
    rounded = RoundedToFp8()
    tensors = {"weight": torch.randn(WHOLE.whole)}
    kept = rounded.kept(tensors, WHOLE)
    assert torch.equal(kept.dequantised(), rounded.dequantise(tensors, WHOLE))


def test_what_products_do_not_take_is_not_kept() -> None:
    int8 = Scaled(torch.int8, PerChannel())
    assert int8.kept({"weight": torch.ones(WHOLE.whole).char()}, WHOLE) is None
    other = PerBlock(64, 128)
    assert Scaled(FP8, other).kept(stored(other), WHOLE) is None
    assert Fp8Blocks.of(values_of(128, 192), torch.ones(1, 2)) is None
    assert Fp8Rows.of(values_of(24, 64), torch.ones(1)) is None
    rows = Fp8Rows(values_of(16, 128), torch.ones(1))
    assert (
        join_kept([rows, Fp8Blocks(values_of(128, 128), torch.ones(1, 1))], torch.bfloat16) is None
    )
    assert join_kept([rows, None], torch.bfloat16) is None
    assert join_kept([rows, rows], torch.float16) is None


def rounded_by(size, num_rows):
    def rounds(x):
        parts = x.float().unflatten(1, (-1, size or x.shape[1]))
        scales = parts.abs().amax(2) / 448.0
        padded = torch.full((num_rows(len(x)), x.shape[1]), 5.0).to(FP8)
        padded[: len(x)] = (parts / scales.unsqueeze(2)).flatten(1).to(FP8)
        by_group = torch.full((scales.shape[1], len(padded)), torch.nan)
        by_group[:, : len(x)] = scales.t()
        return Rounded(padded, by_group.t() if size else by_group.flatten().unsqueeze(1))

    return rounds


def block_scaled_mm(a, b, scales_a, scales_b, dtype):
    """sgl_kernel.fp8_blockwise_scaled_mm, as its source checks what it is given."""
    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert scales_a.stride(0) == 1
    assert scales_b.stride(0) == 1
    assert a.shape[0] % 4 == 0
    assert scales_a.shape == (a.shape[0], a.shape[1] // 128)
    assert scales_b.shape == (b.shape[0] // 128, b.shape[1] // 128)
    left = a.float() * scales_a.repeat_interleave(128, 1)
    right = b.float() * scales_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ right).to(dtype)


FILLED = {RoundedSkinnyTiles: 1.0, MappedSkinnyTiles: 2.0, GemvTiles: 3.0}
"""What stands for each kernel's product."""


def filled_with(value):
    def skinny(x, weight, scales, shape, new):
        size = shape.num_splits, len(x), len(weight)
        return new(size, dtype=x.dtype, device=x.device).fill_(value)

    return skinny


@pytest.fixture
def kernels(monkeypatch):
    for kind, value in FILLED.items():
        monkeypatch.setitem(fp8_products._KERNELS, kind, filled_with(value))
    monkeypatch.setattr(fp8_products, "round_rows", rounded_by(None, lambda n: n))
    monkeypatch.setattr(fp8_products, "round_groups", rounded_by(128, lambda n: -(-n // 4) * 4))
    package = SimpleNamespace(fp8_blockwise_scaled_mm=block_scaled_mm)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)


class OneTensor:
    """As a peer's memory: every result goes to the same place."""

    def __init__(self, size):
        self.memory = torch.empty(size, dtype=torch.bfloat16)

    def __call__(self, size, *, dtype, device):
        assert (tuple(size), dtype) == (tuple(self.memory.shape), self.memory.dtype)
        return self.memory


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scaling", [PerTensor(), PerChannel(), PerBlock(128, 128)])
def test_many_rows_are_multiplied_in_fp8(scaling) -> None:
    kept = Scaled(FP8, scaling).kept(stored(scaling), WHOLE)
    product = kept_product(kept, can_split=False)
    x = torch.randn(MANY, product.in_features).bfloat16()
    want = x.float() @ kept.dequantised().t()
    out = product(x)
    assert out.shape == (1, MANY, 256)
    # Two roundings to three bits, of products that are by chance of either sign.
    assert (out[0] - want).norm() / want.norm() < 0.05
    peers = OneTensor((1, MANY, 256))
    assert torch.equal(product.into(peers, x), out)
    assert torch.equal(peers.memory, out)
    tiles = tiles_for(FP8_BLOCKS if type(kept) is Fp8Blocks else FP8_ROWS, FEW, 256)
    few = torch.full((1, FEW, 256), FILLED[type(tiles)]).bfloat16()
    assert torch.equal(product(x[:FEW]), few)


TILES = TileRule(1, RoundedSkinnyTiles(64, 16, 128, min_programs=384, num_stages=4, num_warps=4))


def other_than(kind):
    """Tiles of the other kernel, and what stands for its product."""
    other, value = next(one for one in FILLED.items() if one[0] is not kind)
    return other(64, 16, 128, min_programs=384, num_stages=4, num_warps=4), value


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scaling", [PerTensor(), PerBlock(128, 128)])
@pytest.mark.parametrize("kind", FILLED)
def test_a_table_names_the_kernel_by_rows_and_output_features(kind, scaling) -> None:
    rounded = kind(64, 16, 128, min_programs=384, num_stages=4, num_warps=4)
    kept = Scaled(FP8, scaling).kept(stored(scaling), WHOLE)
    make = Fp8BlockProduct if type(kept) is Fp8Blocks else Fp8RowProduct
    assert kept.out_features == 256
    (other_tiles, other), value = other_than(kind), FILLED[kind]
    wide, wider = (
        (TileRule(2, rounded, least), TileRule(1, rounded), TileRule(3, other_tiles))
        for least in (256, 257)
    )
    for table, first in ((wide, [value, value, other]), (wider, [value, other, other])):
        product = make(kept, can_split=False, table=table)
        outs = [product(torch.ones(n, 384).bfloat16()) for n in (1, 2, 3)]
        assert [out.float().mean().item() for out in outs] == first
    many = make(kept, can_split=False, table=(TileRule(4, None, 256), TileRule(4, rounded)))
    x = torch.randn(4, 384).bfloat16()
    want = x.float() @ kept.dequantised().t()
    assert (many(x)[0] - want).norm() / want.norm() < 0.05


def test_rounded_tiles_are_tiles_of_their_own() -> None:
    kinds = (SkinnyTiles, *FILLED)
    made = [kind(64, 16, 128, min_programs=384, num_stages=4, num_warps=4) for kind in kinds]
    assert len({*made}) == len(kinds)
    assert [str(one).partition("(")[0] for one in made] == [kind.__name__ for kind in kinds]
    assert len({one.of(4096, 4096, 128, 1, True) for one in made}) == 1


@pytest.mark.parametrize("multiply", [fp8_rounded, fp8_mapped])
def test_a_program_has_rows_of_one_block(multiply) -> None:
    kept = Fp8Blocks(values_of(256, 128), torch.ones(2, 1))
    shape = SkinnyTiles(256, 16, 128, 1, 3, 8).of(256, 128, 128, 1, can_split=False)
    with pytest.raises(ValueError, match="not of one block"):
        multiply(torch.ones(1, 128), kept.values, kept.scales, shape)


@pytest.mark.parametrize("multiply", [fp8_rounded, fp8_mapped])
def test_a_turn_has_columns_of_one_block(multiply) -> None:
    """Twice as many would be multiplied by the first block's scale."""
    kept = Fp8Blocks(values_of(128, 512), torch.ones(1, 4))
    shape = SkinnyTiles(64, 16, 256, 1, 3, 8).of(128, 512, 128, 1, can_split=False)
    with pytest.raises(ValueError, match="256 columns of a turn are not of one block"):
        multiply(torch.ones(1, 512), kept.values, kept.scales, shape)


@pytest.mark.usefixtures("kernels")
def test_parts_are_several_where_their_reader_sums_up() -> None:
    kept = Fp8Rows(values_of(128, 4096), torch.ones(1))
    x = torch.ones(1, 4096)
    assert len(Fp8RowProduct(kept, can_split=True, table=(TILES,))(x)) == 8
    assert len(Fp8RowProduct(kept, can_split=False, table=(TILES,))(x)) == 1


@pytest.mark.usefixtures("kernels")
def test_sizes_that_no_turn_divides_go_the_way_of_many() -> None:
    kept = Fp8Rows(values_of(32, 48), torch.ones(1))
    x = torch.randn(1, 48).bfloat16()
    want = x.float() @ kept.dequantised().t()
    out = Fp8RowProduct(kept, can_split=False, table=(TILES,))(x)
    assert (out[0] - want).norm() / want.norm() < 0.1


def test_blocks_need_their_kernel(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(ConfigError, match="quantized_products to dequantize"):
        Fp8BlockProduct(Fp8Blocks(values_of(128, 128), torch.ones(1, 1)), can_split=False)


@pytest.mark.parametrize("can_split", [True, False])
@pytest.mark.parametrize("out_features", [128, 4096, 6144, 28672])
@pytest.mark.parametrize("in_features", [512, 1792, 4096, 14336])
def test_splits_are_whole_turns(out_features, in_features, can_split) -> None:
    for table, num_rows in product((FP8_ROWS, FP8_BLOCKS, INT4), (1, 16, 64, 192)):
        tiles = tiles_for(table, num_rows, out_features)
        if tiles is None:
            continue
        shape = tiles.of(out_features, in_features, 128, num_rows, can_split)
        assert in_features % (shape.num_splits * shape.block_k) == 0
        assert shape.num_splits == 1 or can_split


@pytest.mark.parametrize("table", [FP8_ROWS, FP8_BLOCKS, INT4])
def test_tables_are_in_order(table) -> None:
    """No rule is hidden by those before it."""
    limits = [(rule.max_rows, -rule.min_out_features) for rule in table]
    assert limits == sorted(set(limits))
    for tiles in tiles_of(table):
        is_of_one_row = isinstance(tiles, GemvTiles)
        assert tiles.block_rows >= (2 if is_of_one_row else 64)
        assert tiles.block_tokens >= (1 if is_of_one_row else 16)


@pytest.mark.parametrize("table", [FP8_ROWS, FP8_BLOCKS, INT4, FP8_GATED, INT4_GATED])
def test_dot_products_are_of_one_row(table) -> None:
    for rule in table:
        assert isinstance(rule.tiles, GemvTiles) == (rule.max_rows == 1)


def tiles_of(table):
    return [rule.tiles for rule in table if rule.tiles is not None]


def test_tables_name_kernels_that_their_forms_have() -> None:
    assert {type(tiles) for tiles in tiles_of(FP8_ROWS + FP8_BLOCKS)} <= set(fp8_products._KERNELS)
    assert {type(tiles) for tiles in tiles_of(INT4)} == {SkinnyTiles, MmaTiles}


def test_a_turn_is_a_blocks_width() -> None:
    """A scale is read a turn, and of rounded tiles once for all of a program's rows."""
    for tiles in tiles_of(FP8_BLOCKS):
        if isinstance(tiles, GemvTiles):
            assert tiles.block_k % 128 == 0
            continue
        assert tiles.block_k == 128
        assert type(tiles) is SkinnyTiles or 128 % tiles.block_rows == 0


GATED_TILES = GemvTiles(8, 1, 128, min_programs=384, num_stages=1, num_warps=4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scaling", [PerChannel(), PerBlock(128, 128)])
def test_gates_are_bent_where_their_products_are(scaling, monkeypatch) -> None:
    """Of as many rows as the table says; of more in a launch behind the product."""
    taken = []

    def gated(x, weight, scales, shape, gate):
        taken.append((shape, gate))
        return torch.full((1, len(x), len(weight) // 2), 4.0)

    def behind(parts, dtype, gate):
        return (parts.sum(0)[:, : parts.shape[2] // 2]).to(dtype)

    monkeypatch.setattr(fp8_products, "fp8_gemv", gated)
    monkeypatch.setattr(product_module, "gate_and_mul", behind)
    kept = Scaled(FP8, scaling).kept(stored(scaling), WHOLE)
    make = Fp8BlockProduct if type(kept) is Fp8Blocks else Fp8RowProduct
    rounded = RoundedSkinnyTiles(64, 16, 128, min_programs=1, num_stages=4, num_warps=4)
    product = make(kept, True, (TileRule(2, rounded),), (TileRule(1, GATED_TILES),))
    activation = KeptGatedProduct(product, "silu")
    assert activation.in_features == 384
    outs = [activation(torch.ones(n, 384).bfloat16()) for n in (1, 2)]
    assert [tuple(out.shape) for out in outs] == [(1, 128), (2, 128)]
    assert [out.unique().tolist() for out in outs] == [[4.0], [FILLED[RoundedSkinnyTiles]]]
    assert [(shape.num_splits, gate) for shape, gate in taken] == [(1, "silu")]


@pytest.mark.parametrize("gate", ["silu", None])
def test_dot_products_refuse_what_they_cannot(gate) -> None:
    kept = Fp8Rows(values_of(32, 256), torch.ones(1))
    split = SkinnyShape(8, 1, 128, 2, 1, 4)
    rows = 1 if gate else 2
    with pytest.raises(ValueError, match="parts of its sums" if gate else "2 rows of x"):
        fp8_gemv(torch.ones(rows, 256), kept.values, kept.scales, split, gate=gate)
    blocks = Fp8Blocks(values_of(128, 256), torch.ones(1, 2))
    narrow = SkinnyShape(8, 1, 64, 1, 1, 4)
    with pytest.raises(ValueError, match="64 columns of a turn are no whole blocks"):
        fp8_gemv(torch.ones(1, 256), blocks.values, blocks.scales, narrow, gate=gate)
