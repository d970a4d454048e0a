"""Products of kept weights with one row of x, and activations of gated blocks, against their
dequantised matrices: eager, in graphs, and what is no number."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.h200.product_candidates import one_row_worth_trying
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers.test_quantised_products import EXACT, KINDS, relative_error
from workers.layers.quantised.fp8_products import Fp8BlockProduct, Fp8RowProduct
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.products import kept_product
from workers.layers.quantised.skinny_shape import GemvTiles
from workers.layers.quantised.tile_table import TileRule

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
SIZES = [(4096, 14336), (512, 1792)]
EVERY = 4
MAKES = {"fp8_rows": Fp8RowProduct, "fp8_blocks": Fp8BlockProduct}
GATES = ("silu", "gelu_tanh")


def gemv_tiles(kind):
    """Some of those that a sweep tries: each is compiled for each size."""
    name = "int4" if kind.startswith("int4") else kind
    return [one for one in one_row_worth_trying(name) if isinstance(one, GemvTiles)][::EVERY]


def product_by(kind, kept, can_split, tiles):
    rule = (TileRule(1, tiles),)
    return MAKES.get(kind, Int4Product)(kept, can_split, rule, rule)


def row_of(columns, dtype=torch.bfloat16):
    """Of numbers of many sizes, as activations are."""
    sizes = torch.logspace(-3, 1, columns, device=CUDA)[torch.randperm(columns, device=CUDA)]
    return (torch.randn(1, columns, device=CUDA) * sizes).to(dtype)


def activated(pair, gate):
    first, second = pair.chunk(2, dim=1)
    if gate == "silu":
        return torch.nn.functional.silu(first) * second
    return torch.nn.functional.gelu(first, approximate="tanh") * second


@pytest.mark.parametrize(("kind", "size"), product(KINDS, SIZES))
def test_a_row_is_multiplied_as_it_is(kind, size) -> None:
    """FP8, too: x is not rounded."""
    kept = KINDS[kind](*size)
    x = row_of(size[1])
    want = x.double() @ kept.dequantised().double().t()
    for tiles, can_split in product(gemv_tiles(kind), (True, False)):
        made = product_by(kind, kept, can_split, tiles)
        parts = made(x)
        assert parts.shape[1:] == (1, size[0])
        error = relative_error(parts.double().sum(0), want)
        assert error < EXACT, (tiles, can_split, error)
        assert torch.equal(made(x), parts)


@pytest.mark.parametrize(("kind", "gate"), product(KINDS, GATES))
def test_activations_are_those_of_the_dequantised_matrix(kind, gate) -> None:
    kept = KINDS[kind](1024, 4096)
    x = row_of(4096) * 100.0
    if kind.startswith("int4"):
        x /= 100.0
    want = activated(x.double() @ kept.dequantised().double().t(), gate)
    for tiles in gemv_tiles(kind):
        made = KeptGatedProduct(product_by(kind, kept, True, tiles), gate)
        out = made(x)
        assert out.shape == (1, 512)
        error = relative_error(out.double(), want)
        assert error < 2 * EXACT, (tiles, error)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_take_one_kernel_for_an_activation(kind) -> None:
    kept = KINDS[kind](1024, 2048)
    for num_rows in (1, 2, 16):
        x = row_of(2048).repeat(num_rows, 1)
        made = kept_product(kept, True)
        want = activated(made(x).double().sum(0), "silu")
        assert relative_error(KeptGatedProduct(made, "silu")(x).double(), want) < 2 * EXACT


@pytest.mark.parametrize("kind", ["int4", "int4_act_order", "int4_symmetric"])
def test_halves_of_sixteen_bits_are_multiplied(kind) -> None:
    kept = KINDS[kind](512, 2048)
    x = row_of(2048, torch.float16)
    want = x.double() @ kept.dequantised().double().t()
    for tiles in gemv_tiles(kind):
        out = product_by(kind, kept, False, tiles)(x)
        assert out.dtype == torch.float16
        assert relative_error(out[0].double(), want) < EXACT


@pytest.mark.parametrize(("kind", "odd"), product(KINDS, [torch.nan, torch.inf, -torch.inf]))
def test_what_is_no_number_stays_none(kind, odd) -> None:
    kept = KINDS[kind](512, 1024)
    x = row_of(1024)
    x[0, 700] = odd
    for tiles in gemv_tiles(kind):
        out = product_by(kind, kept, True, tiles)(x).sum(0)
        assert not out.isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_times_weights_is_nothing(kind) -> None:
    kept = KINDS[kind](512, 1024)
    for tiles in gemv_tiles(kind):
        assert not product_by(kind, kept, True, tiles)(row_of(1024) * 0.0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_repeat_activations(kind) -> None:
    made = KeptGatedProduct(kept_product(KINDS[kind](1024, 2048), True), "silu")
    x = row_of(2048)
    made(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = made(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, made(x))
