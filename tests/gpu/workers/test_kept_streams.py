"""The ring of int4_stream.py: each of its tiles that a sweep tries, with rows that end within a
block, with an activation, and between kernels that may begin before their predecessor ends."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from attention.kernels.providers import probe_gluon
from benchmarks.h200.product_candidates import one_row_worth_trying
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers.test_kept_rows import activated, row_of
from tests.gpu.workers.test_quantised_products import EXACT, KINDS, relative_error
from workers.layers.cuda.norm import rms_norm
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import StreamTiles
from workers.layers.quantised.tile_table import TileRule

pytestmark = [
    *NEEDS_GPU,
    NEEDS_HOPPER,
    pytest.mark.skipif(not probe_gluon().is_available, reason=str(probe_gluon().missing)),
]
STREAMS = [one for one in one_row_worth_trying("int4") if isinstance(one, StreamTiles)]
# 15,400 rows are blocks of 16, 32 and 48 of which the last one is not whole; of 132 programs each
# has several. 520 are fewer blocks than programs.
SIZES = [(15400, 4096), (520, 14336)]
ROUNDS = 50


def product_of(kept, tiles):
    rule = (TileRule(1, tiles),)
    return Int4Product(kept, False, rule, rule)


@pytest.mark.parametrize(("kind", "size"), product(["int4", "int4_act_order"], SIZES))
def test_rows_that_end_within_a_block(kind, size) -> None:
    kept = KINDS[kind](*size)
    x = row_of(size[1])
    want = x.double() @ kept.dequantised().double().t()
    for tiles in STREAMS:
        made = product_of(kept, tiles)
        assert relative_error(made(x)[0].double(), want) < EXACT, tiles


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_activations_of_rows_that_end_within_a_block(gate) -> None:
    kept = KINDS["int4"](2 * 7208, 4096)
    x = row_of(4096)
    want = activated(x.double() @ kept.dequantised().double().t(), gate)
    for tiles in STREAMS:
        made = KeptGatedProduct(product_of(kept, tiles), gate)
        assert relative_error(made(x).double(), want) < 2 * EXACT, tiles


@pytest.mark.parametrize("tiles", STREAMS, ids=str)
def test_kernels_before_and_behind_it_may_overlap(tiles) -> None:
    """The predecessor writes x, and the successor reads what it gave, each time anew."""
    first, last = KINDS["int4"](2 * 7168, 4096), KINDS["int4"](4096, 7168)
    up, down = KeptGatedProduct(product_of(first, tiles), "silu"), product_of(last, tiles)
    scale = torch.ones(4096, dtype=torch.bfloat16, device=CUDA)
    start = row_of(4096)
    ways = (lambda x: rms_norm(x, scale, 1e-5)), up, lambda x: down(x)[0]

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
