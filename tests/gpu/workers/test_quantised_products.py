"""Products with kept weights against their dequantised matrices, eager and in graphs, and engines
whose weights stay quantised."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.int4_weights import int4_weight, kept_of
from tests.fakes.quantised_checkpoints import FP8, by_scale, gptq, quantise_folder
from tests.fakes.tiny_models import TinyModel, save_tiny_model
from tests.gpu.engines import CUDA, GREEDY, generate, prompts_of
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from workers.config import EngineConfig
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.quantised.fp8_mapped import fp8_mapped
from workers.layers.quantised.fp8_products import Fp8BlockProduct, Fp8RowProduct
from workers.layers.quantised.fp8_rounded import fp8_rounded
from workers.layers.quantised.fp8_rounding import round_groups, round_rows
from workers.layers.quantised.int4_spread import int4_spread
from workers.layers.quantised.products import kept_product
from workers.layers.quantised.skinny_shape import (
    MappedSkinnyTiles,
    RoundedSkinnyTiles,
    SkinnyShape,
)
from workers.layers.quantised.tile_table import FP8_BLOCKS, TileRule, tiles_for
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
EXACT, ROUNDED = 5e-3, 5e-2
"""Relative: of weights as they are with sums in float32, a result of 16 bits; with activations in
FP8."""
SIZES = [(6144, 4096), (4096, 14336), (512, 1792)]
ROWS = [1, 3, 16, 17, 64, 65, 300]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


def fp8_values(rows, columns):
    values = torch.randn(rows, columns, device=CUDA) * 64
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_rows(rows, columns):
    return Fp8Rows(fp8_values(rows, columns), torch.rand(rows, device=CUDA) * 1e-3)


def fp8_blocks(rows, columns):
    scales = torch.rand(rows // 128, columns // 128, device=CUDA) * 1e-3
    return Fp8Blocks(fp8_values(rows, columns), scales)


def int4(rows, columns, **kind):
    weight = int4_weight(rows, columns, device=CUDA, **kind)
    kept = kept_of(weight)
    assert torch.equal(kept.dequantised(), weight.dequantised())
    return kept


def int4_in_order_of_its_own(rows, columns):
    """With scales of 32 bits."""
    return int4(rows, columns, has_order=True, has_half_scales=False)


def int4_symmetric(rows, columns):
    return int4(rows, columns, is_symmetric=True)


KINDS = {
    "fp8_rows": fp8_rows,
    "fp8_blocks": fp8_blocks,
    "int4": int4,
    "int4_act_order": int4_in_order_of_its_own,
    "int4_symmetric": int4_symmetric,
}


def relative_error(out, want):
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("kind", "size"), product(KINDS, SIZES))
def test_products_are_those_of_the_dequantised_matrix(kind, size) -> None:
    kept = KINDS[kind](*size)
    matrix = kept.dequantised().double()
    for can_split, num_rows in product((True, False), ROWS):
        x = torch.randn(num_rows, size[1], device=CUDA).bfloat16()
        made = kept_product(kept, can_split)
        out = made(x)
        assert out.shape[1:] == (num_rows, size[0])
        assert can_split or len(out) == 1
        error = relative_error(out.double().sum(0), x.double() @ matrix.t())
        is_exact = kind.startswith("int4") or num_rows == 1
        assert error < (EXACT if is_exact else ROUNDED), (num_rows, can_split, error)
        peers = torch.empty_like(out)
        assert made.into(lambda *size, peers=peers, **kinds: peers, x) is peers
        if is_repeatable(kind, size, num_rows):
            assert torch.equal(peers, out), (num_rows, can_split)
        else:
            again = relative_error(peers, out.double())
            assert again < EXACT, (num_rows, can_split, again)


def is_repeatable(kind, size, num_rows):
    """Not where sglang-kernel takes CUTLASS' stream-K, which adds up sums as they are ready."""
    rows, columns = size
    if kind != "fp8_blocks" or columns <= 3 * rows:
        return True
    return tiles_for(FP8_BLOCKS, num_rows, rows) is not None


ROUNDED_TILES = [
    RoundedSkinnyTiles(64, 16, 128, min_programs=528, num_stages=4, num_warps=4),
    RoundedSkinnyTiles(128, 16, 128, min_programs=132, num_stages=4, num_warps=8),
    RoundedSkinnyTiles(128, 16, 128, min_programs=264, num_stages=4, num_warps=4),
    RoundedSkinnyTiles(64, 32, 128, min_programs=264, num_stages=4, num_warps=4),
    RoundedSkinnyTiles(128, 64, 128, min_programs=132, num_stages=3, num_warps=8),
    MappedSkinnyTiles(64, 16, 128, min_programs=528, num_stages=4, num_warps=4),
    MappedSkinnyTiles(128, 16, 128, min_programs=132, num_stages=4, num_warps=8),
    MappedSkinnyTiles(128, 64, 128, min_programs=132, num_stages=3, num_warps=8),
]
ROUNDED_TILES_OF_ROWS = [
    RoundedSkinnyTiles(64, 16, 256, min_programs=528, num_stages=3, num_warps=4),
    RoundedSkinnyTiles(256, 64, 128, min_programs=132, num_stages=3, num_warps=8),
    MappedSkinnyTiles(64, 16, 256, min_programs=528, num_stages=3, num_warps=4),
]
ROUNDED_CASES = [
    (kind, tiles)
    for kind in ("fp8_rows", "fp8_blocks")
    for tiles in ROUNDED_TILES + (ROUNDED_TILES_OF_ROWS if kind == "fp8_rows" else [])
]


def rounded_product(kind, kept, can_split, tiles):
    make = Fp8BlockProduct if kind == "fp8_blocks" else Fp8RowProduct
    return make(kept, can_split, (TileRule(64, tiles),))


@pytest.mark.parametrize(("case", "size"), product(ROUNDED_CASES, SIZES), ids=str)
def test_products_with_x_rounded_inside_the_kernel(case, size) -> None:
    kind, tiles = case
    kept = KINDS[kind](*size)
    matrix = kept.dequantised().double()
    for can_split, num_rows in product((True, False), [n for n in ROWS if n <= 64]):
        # Tokens and blocks of columns of very different sizes.
        sizes = torch.randint(-20, 20, (num_rows, size[1] // 128, 1), device=CUDA).float().exp2()
        x = (torch.randn(num_rows, size[1] // 128, 128, device=CUDA) * sizes).flatten(1).bfloat16()
        made = rounded_product(kind, kept, can_split, tiles)
        out = made(x)
        assert out.shape[1:] == (num_rows, size[0])
        assert can_split or len(out) == 1
        want = x.double() @ matrix.t()
        for row, wanted in zip(out.double().sum(0), want, strict=True):
            assert relative_error(row, wanted) < ROUNDED
        assert torch.equal(made(x), out)


MULTIPLIES = pytest.mark.parametrize("multiply", [fp8_rounded, fp8_mapped])


@MULTIPLIES
@pytest.mark.parametrize("kind", ["fp8_rows", "fp8_blocks"])
def test_rounding_inside_the_kernel_is_exact_of_four_bits(kind, multiply) -> None:
    kept = KINDS[kind](512, 1024)
    # What FP8 tensor cores leave of a turn's sum, about 14 bits, is within EXACT.
    powers = torch.randint(-90, 60, (5, 8, 1), device=CUDA).float().exp2()
    x = (torch.randint(-15, 16, (5, 8, 128), device=CUDA) * powers).flatten(1).bfloat16()
    x[2] = 0.0
    shape = SkinnyShape(128, 16, 128, num_splits=2, num_stages=3, num_warps=4)
    out = multiply(x, kept.values, kept.scales, shape).double().sum(0)
    assert not out[2].any()
    want = x.double() @ kept.dequantised().double().t()
    for row in (0, 1, 3, 4):
        assert relative_error(out[row], want[row]) < EXACT


@MULTIPLIES
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none_and_in_its_row(odd, multiply) -> None:
    kept = fp8_rows(256, 512)
    x = torch.randn(3, 512, device=CUDA).bfloat16()
    x[1, 200] = odd
    shape = SkinnyShape(64, 16, 128, num_splits=1, num_stages=3, num_warps=4)
    out = multiply(x, kept.values, kept.scales, shape)[0]
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("tiles", [ROUNDED_TILES[1], ROUNDED_TILES[-2]], ids=str)
@pytest.mark.parametrize("kind", ["fp8_rows", "fp8_blocks"])
def test_graphs_repeat_products_with_x_rounded(kind, tiles) -> None:
    made = rounded_product(kind, KINDS[kind](1024, 2048), can_split=True, tiles=tiles)
    x = torch.randn(7, 2048, device=CUDA).bfloat16()
    made(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = made(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, made(x))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_repeat_products(kind) -> None:
    made = kept_product(KINDS[kind](1024, 2048), can_split=True)
    for num_rows in (1, 16, 100):
        x = torch.randn(num_rows, 2048, device=CUDA).bfloat16()
        made(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made(x)
        x.normal_()
        graph.replay()
        assert torch.equal(out, made(x))


def test_rounding_is_within_half_a_step() -> None:
    x = torch.randn(50, 4096, device=CUDA).bfloat16() * 100
    x[3] = 0.0
    for size, rounded in ((4096, round_rows(x)), (128, round_groups(x))):
        spread = rounded.scales[:50].repeat_interleave(size, 1)
        error = (rounded.values[:50].float() * spread - x.float()).abs()
        assert (error <= x.float().abs() / 16 * 1.01 + spread * 2**-10 * 1.01).all()
    x[5, 7] = torch.nan
    assert round_rows(x).values[5].float().isnan().any()


def test_a_spread_matrix_is_rounded_once() -> None:
    kept = int4(512, 1024)
    want = kept.dequantised().bfloat16()
    assert torch.equal(int4_spread(kept, torch.bfloat16), want)


RECIPES = {
    "fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, by_scale(FP8, None)),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        by_scale(FP8, (128, 128), "weight_scale_inv"),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        gptq(128, has_act_order=True),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_engines_keep_weights_and_text(name, tmp_path) -> None:
    """Few rows at a time: products differ from dequantised ones by the rounding of sums only."""
    folder = save_tiny_model(TinyModel("llama", WIDE), tmp_path)
    recipe, quantiser = RECIPES[name]
    quantise_folder(folder, recipe, lambda module: quantiser)
    config = EngineConfig(model=str(folder), max_running_requests=8, dtype="bfloat16")
    model = load_model(config, SingleRank(), CUDA, torch.bfloat16).model
    layer = model.model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
        assert linear.kept is not None
    del model, layer, linear
    prompts = prompts_of(4, 512, longest=14)
    ways = ({}, {"enable_cuda_graphs": False}, {"quantized_products": "dequantize"})
    texts = [
        generate(EngineConfig(**{**BASE, "model": str(folder), **changes}), prompts, GREEDY)
        for changes in ways[:2]
    ]
    assert texts[0] == texts[1]
    alone = [
        generate(EngineConfig(**{**BASE, "model": str(folder), **changes}), prompts[:1], GREEDY)[0]
        for changes in ways[1:]
    ]
    assert alone[0][0] == alone[1][0]


BASE = {"max_running_requests": 8, "dtype": "bfloat16", "num_pages": 200}


def test_fp8_while_loading_takes_half_of_the_memory(tmp_path) -> None:
    folder = save_tiny_model(TinyModel("llama", WIDE), tmp_path)
    config = EngineConfig(model=str(folder), quantization="fp8", load_format="dummy")
    model = load_model(config, SingleRank(), CUDA, torch.bfloat16).model
    kept = [one.kept for one in model.layers_as_stored()]
    assert all(type(one) is Fp8Rows for one in kept)
    assert all(one.values.dtype.itemsize == 1 for one in kept)
