"""A rank that has a part of the experts chooses tiles by the rows that come to it, not by all."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.cuda import routed_experts
from workers.layers.cuda.expert_routing import Chosen
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.stacks import Fp8Stack
from workers.layers.moe.products import products_for
from workers.layers.quantised import expert_products
from workers.layers.routed_experts import SILU, RoutedWeights

NUM_HERE, NUM_CHOSEN = 32, 8


class FoundError(Exception):
    """Whose argument was what the test is about: nothing is computed."""


def chosen_of(num_tokens):
    shape = num_tokens, NUM_CHOSEN
    ids = torch.zeros(shape, dtype=torch.int32)
    return Chosen(torch.ones(shape), ids, ids, torch.zeros(NUM_HERE + 1, dtype=torch.int32))


@pytest.mark.parametrize(("num_parts", "rows"), [(1, 64), (2, 32), (4, 16)])
def test_tiles_are_those_of_the_rows_that_come(monkeypatch, num_parts, rows) -> None:
    def tiles_for(table, num_pairs, num_experts, shared_bytes):
        raise FoundError(num_pairs / num_experts)

    monkeypatch.setattr(routed_experts, "DeviceLimits", SimpleNamespace(of=lambda device: HOPPER))
    monkeypatch.setattr(routed_experts, "tiles_for", tiles_for)
    weights = RoutedWeights(torch.empty(NUM_HERE, 32, 16), torch.empty(NUM_HERE, 16, 16), SILU)
    chosen = chosen_of(256)
    with pytest.raises(FoundError) as found:
        routed_experts.partial_products(torch.empty(256, 16), chosen, weights, num_parts)
    assert found.value.args == (rows,)
    monkeypatch.setattr(routed_experts, "counted", lambda *_: chosen)
    products = products_for(torch.bfloat16, torch.device("cuda"), num_parts)
    with pytest.raises(FoundError) as found:
        products(torch.empty(256, 16), chosen.ids, chosen.weights, weights)
    assert found.value.args == (rows,)


@pytest.mark.parametrize(("num_parts", "way"), [(1, "many"), (2, "few"), (4, "few")])
def test_so_are_the_ways_of_kept_ones(monkeypatch, num_parts, way) -> None:
    def way_of(name):
        return SimpleNamespace(products=lambda *arguments: (name, arguments[-1]))

    table = (32, way_of("few")), (float("inf"), way_of("many"))
    monkeypatch.setattr(expert_products, "TABLES", {Fp8Stack: table})
    down = Fp8Stack(NUM_HERE, 128, 128, torch.device("cpu"))
    kept = KeptExperts(Fp8Stack(NUM_HERE, 256, 128, torch.device("cpu")), down, SILU, None, None)
    taken = expert_products.kept_partial_products(
        torch.empty(256, 128), chosen_of(256), kept, num_parts
    )
    assert taken == (way, num_parts)
