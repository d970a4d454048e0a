"""int4_stream_row.py: a norm between two products of four bits, of one row, against what the norm's
own kernel and the products leave, eager and in graphs."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.h200.product_candidates import one_row_worth_trying
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers.test_kept_rows import row_of
from tests.gpu.workers.test_quantised_products import EXACT, KINDS, relative_error
from workers.config import EngineConfig
from workers.layers.cuda.norm import add_rms_norm_
from workers.layers.kept.int4 import Int4Groups
from workers.layers.norm import RMSNorm
from workers.layers.quantised import products, tile_table
from workers.layers.quantised.folded_norm import FoldedNorm
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.quantised.skinny_shape import MmaTiles
from workers.layers.quantised.tile_table import TileRule
from workers.layers.sharding import ShardContext
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
SHARD = ShardContext(SingleRank(), torch.bfloat16, CUDA)
TILES = [one for one in one_row_worth_trying("int4") if isinstance(one, MmaTiles)]
SIZES = [(4096, 4096, 14336), (1024, 640, 364)]
"""(inputs of the first product, hidden size, gates)"""


def parts_of(kind, size, tiles=None):
    """tiles: of both products; None is the tables'."""
    if tiles is None:
        tables = [tile_table.INT4, tile_table.INT4_GATED]
    else:
        tables = [(TileRule(1, tiles),)] * 2
    tables[1] = tuple(replace(rule, folds_norm=True) for rule in tables[1])
    inputs, hidden_size, width = size
    norm = RMSNorm(hidden_size, 1e-5, SHARD)
    norm.weight.data.normal_()
    o = Int4Product(KINDS[kind](hidden_size, inputs), True, *tables)
    gate_up = Int4Product(KINDS[kind](2 * width, hidden_size), True, *tables)
    return o, norm, KeptGatedProduct(gate_up, "silu")


def apart(o, norm, gate_up, x, residual):
    return gate_up(add_rms_norm_(o(x), residual, norm.weight, norm.eps))


@pytest.mark.parametrize(
    ("kind", "size"), product(["int4", "int4_act_order", "int4_symmetric"], SIZES)
)
def test_a_row_is_what_the_norms_own_launch_leaves(kind, size) -> None:
    """By the tables' tiles, and by some that a sweep tries. Both round the row once more than the
    other in one place."""
    for one in (None, *TILES[::3]):
        o, norm, gate_up = parts_of(kind, size, one)
        folded = FoldedNorm.of(o, norm, gate_up)
        if folded is None:
            assert one is not None
            continue
        x = row_of(size[0])
        residual = torch.randn(1, norm.weight.shape[0], device=CUDA).bfloat16()
        other = residual.clone()
        want = apart(o, norm, gate_up, x, other)
        got = folded(x, residual)
        assert relative_error(residual.double(), other.double()) < EXACT
        assert relative_error(got.double(), want.double()) < 4 * EXACT


def test_graphs_repeat_layers() -> None:
    """Several one behind the other, as a step has them: each waits for the one before."""
    o, norm, gate_up = parts_of("int4", (4096, 4096, 4096))
    folded = FoldedNorm.of(o, norm, gate_up)
    x, start = row_of(4096), torch.randn(1, 4096, device=CUDA).bfloat16()
    residual = start.clone()

    def layers():
        residual.copy_(start)
        inner = x
        for _ in range(4):
            inner = folded(inner, residual)
            inner = inner / inner.float().square().mean().sqrt().bfloat16()
        return inner

    want = layers().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_layers_of_a_model_have_it(tmp_path: Path, monkeypatch) -> None:
    asked = tuple(replace(rule, folds_norm=True) for rule in tile_table.INT4_GATED)
    made = partial(Int4Product, gated_table=asked)
    monkeypatch.setitem(products._PRODUCTS, Int4Groups, made)
    config = json.loads(Path("benchmarks/h200/models/llama-3.1-8b-gptq.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    engine = EngineConfig(
        model=str(tmp_path), load_format="dummy", max_context_len=512, max_running_requests=1
    )
    runner = make_model_runner(engine, SingleRank(), CUDA, lambda done, total: None)
    layer = runner._model._layers[0]
    assert layer.folded is not None
    attended = row_of(4096)
    residual = torch.randn(1, 4096, device=CUDA).bfloat16()
    other = residual.clone()
    with torch.inference_mode():
        got = layer.finish(attended, residual)
        want = replace(layer, folded=None).finish(attended, other)
    assert relative_error(residual.double(), other.double()) < EXACT
    assert relative_error(got.double(), want.double()) < 4 * EXACT
