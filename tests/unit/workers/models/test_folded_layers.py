"""Which rows of a fused layer go past the join behind attention, and which layers have that way."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.gemm.matrix import BiasedProducts
from workers.layers.kept.int4 import Int4Groups
from workers.layers.norm import RMSNorm
from workers.layers.quantised import tile_table
from workers.layers.quantised.folded_norm import FoldedNorm
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct
from workers.layers.sharding import ShardContext
from workers.models.cuda_decoder import LayerJoins
from workers.models.cuda_mlps import DenseMlp, UnfusedMlp
from workers.models.cuda_stream import _folded_norm, _GroupedLayer
from workers.parallel.group import SingleRank


class Told:
    """Notes what is called, and with which of what came before."""

    def __init__(self) -> None:
        self.calls = []

    def named(self, name):
        def call(*arguments):
            self.calls.append((name, *[one for one in arguments if isinstance(one, str)]))
            return name

        return call


class Folded:
    def __init__(self, told) -> None:
        self._told = told

    def takes(self, attended):
        return len(attended) == 1

    def __call__(self, attended, residual):
        return self._told.named("folded")(residual)


class Mlp:
    last = "last"

    def __init__(self, told) -> None:
        self.inner = told.named("inner")


@pytest.mark.parametrize(
    ("num_rows", "has_folded", "calls"),
    [
        (1, True, [("folded", "stream"), ("after mlp", "last", "folded", "stream")]),
        (
            2,
            True,
            [
                ("after attention", "o", "stream"),
                ("inner", "after attention"),
                ("after mlp", "last", "inner", "stream"),
            ],
        ),
        (
            1,
            False,
            [
                ("after attention", "o", "stream"),
                ("inner", "after attention"),
                ("after mlp", "last", "inner", "stream"),
            ],
        ),
    ],
)
def test_one_row_goes_past_the_join(num_rows, has_folded, calls) -> None:
    told = Told()
    layer = _GroupedLayer(
        o="o",
        mlp=Mlp(told),
        joins=LayerJoins(told.named("after attention"), told.named("after mlp")),
        qkv=None,
        attention=None,
        folded=Folded(told) if has_folded else None,
    )
    assert layer.finish(torch.zeros(num_rows, 8), "stream") == "after mlp"
    assert told.calls == calls


def test_a_layer_has_it_for_four_bits_and_a_norm_behind_whole_sums() -> None:
    shard = ShardContext(SingleRank(), torch.bfloat16, torch.device("cpu"))
    norm = RMSNorm(256, 1e-5, shard)
    o = Int4Product(Int4Groups.unread(256, 512, 4, has_order=False), can_split=True)
    asked = tuple(replace(rule, folds_norm=True) for rule in tile_table.INT4_GATED)
    first = Int4Product(Int4Groups.unread(1024, 256, 2, has_order=False), True, gated_table=asked)
    mlp = DenseMlp(KeptGatedProduct(first, "silu"), first)
    joins = LayerJoins(lambda *_: None, lambda *_: None, norm)
    assert isinstance(_folded_norm(o, joins, mlp), FoldedNorm)
    assert _folded_norm(o, LayerJoins(joins.after_attention, joins.after_mlp), mlp) is None
    assert _folded_norm(BiasedProducts(o, torch.zeros(256)), joins, mlp) is None
    assert _folded_norm(o, joins, UnfusedMlp(first, first, "silu")) is None
    assert _folded_norm(o, joins, DenseMlp(lambda x: x, first)) is None
