"""int4_resident.py: each of the tiles that a sweep tries, with rows that end within a block, with
an activation, and between kernels that may begin before their predecessor ends."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.h200.product_candidates import one_row_worth_trying
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers.test_kept_rows import activated, row_of
from tests.gpu.workers.test_quantised_products import EXACT, KINDS, relative_error
from workers.layers.cuda.norm import rms_norm
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import ResidentShape, ResidentTiles
from workers.layers.quantised.tile_table import TileRule

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
RESIDENTS = [one for one in one_row_worth_trying("int4") if isinstance(one, ResidentTiles)]
# Blocks of 16 rows and of 32 whose last one is not whole; each program has one, two or more.
ROWS = 15400
ROUNDS = 50


def product_of(kept, tiles):
    rule = (TileRule(1, tiles),)
    return Int4Product(kept, False, rule, rule)


def stays(tiles, kept):
    shape = tiles.of(kept.out_features, kept.in_features, kept.turn, 1, can_split=False)
    return isinstance(shape, ResidentShape)


@pytest.mark.parametrize(
    ("kind", "columns"), product(["int4", "int4_act_order"], [2048, 4096]), ids=str
)
def test_rows_that_end_within_a_block(kind, columns) -> None:
    kept = KINDS[kind](ROWS, columns)
    x = row_of(columns)
    want = x.double() @ kept.dequantised().double().t()
    for tiles in RESIDENTS:
        assert stays(tiles, kept)
        made = product_of(kept, tiles)
        assert relative_error(made(x)[0].double(), want) < EXACT, tiles


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_activations_of_rows_that_end_within_a_block(gate) -> None:
    kept = KINDS["int4"](2 * 7208, 4096)
    x = row_of(4096)
    want = activated(x.double() @ kept.dequantised().double().t(), gate)
    for tiles in RESIDENTS:
        assert stays(tiles, kept)
        made = KeptGatedProduct(product_of(kept, tiles), gate)
        assert relative_error(made(x).double(), want) < 2 * EXACT, tiles


@pytest.mark.parametrize("tiles", RESIDENTS, ids=str)
def test_kernels_before_and_behind_it_may_overlap(tiles) -> None:
    """The predecessor writes x, and the successor reads what it gave, each time anew: a norm, two
    of its own kind one behind the other, and a product of another kind."""
    wide = [KINDS["int4"](2 * 4096, 4096), KINDS["int4"](2 * 7168, 4096)]
    assert all(stays(tiles, kept) for kept in wide)
    first, second = (KeptGatedProduct(product_of(kept, tiles), "silu") for kept in wide)
    down = product_of(KINDS["int4"](4096, 7168), tiles)
    scale = torch.ones(4096, dtype=torch.bfloat16, device=CUDA)
    start = row_of(4096)
    ways = (lambda x: rms_norm(x, scale, 1e-5)), first, second, lambda x: down(x)[0]

    def run(wait=lambda: None):
        x = start
        for _ in range(4):
            for way in ways:
                x = way(x)
                wait()
        return x

    want = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for number in range(ROUNDS):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want), number
