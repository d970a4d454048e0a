"""What tiles of experts are compared, with what they should give, and which pair is taken."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from benchmarks.h200.expert_candidate_tiles import candidates
from benchmarks.h200.expert_candidates import Found, fastest_pair
from benchmarks.h200.expert_products import PRODUCTS, activated_rows, projected_rows
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import Chosen
from workers.layers.cuda.expert_tiles import BY_MAPS, tiles_for
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch


@pytest.mark.parametrize("rows", [0.1, 4, 16, 31, 32, 64, 128, 1024])
def test_candidates_begin_with_what_is_shipped_and_fit(rows) -> None:
    shipped = tiles_for(BY_MAPS, int(rows * 1000), 1000, HOPPER.shared_bytes)
    for product, own, weights in zip(PRODUCTS, shipped, (2, 1), strict=True):
        found = candidates(product, rows, shipped)
        assert found[0] == own
        assert len(set(found)) == len(found) > 3
        for tiles in found:
            stage = (tiles.block_rows + weights * tiles.columns) * tiles.depth * 2
            assert stage * tiles.num_stages <= HOPPER.shared_bytes, tiles


def test_the_fastest_pair_has_blocks_of_one_size() -> None:
    small, large = ExpertTiles(16, 64, 64, 3, 4), ExpertTiles(32, 64, 64, 3, 4)
    slow = ExpertTiles(32, 128, 64, 3, 4)
    found = [
        Found("activate", small, 1.0, 0.0),
        Found("activate", large, 3.0, 0.0),
        Found("project", small, 5.0, 0.0),
        Found("project", slow, 4.0, 0.0),
        Found("project", large, 2.0, 0.0),
    ]
    assert [one.tiles for one in fastest_pair(found)] == [large, large]
    assert [one.tiles for one in fastest_pair(found[:4])] == [small, small]


@pytest.mark.parametrize("gating", [SILU, Gating(1.702, 1.5)], ids=["silu", "gpt_oss"])
def test_what_products_should_give_is_what_the_oracle_gives(gating) -> None:
    num_tokens, num_experts, hidden, width = 9, 5, 24, 16
    x, ids = torch.randn(num_tokens, hidden), torch.rand(num_tokens, num_experts).topk(3).indices
    shares = torch.rand(ids.shape)
    biases = (torch.randn(num_experts, 2 * width), torch.randn(num_experts, hidden))
    experts = RoutedWeights(
        torch.randn(num_experts, 2 * width, hidden),
        torch.randn(num_experts, hidden, width),
        gating,
        *(() if gating is SILU else biases),
    )
    counts = ids.flatten().bincount(minlength=num_experts)
    chosen = Chosen(shares, ids.int(), torch.empty(0), counts)
    pairs = ids.flatten().argsort(stable=True)
    activated = activated_rows(experts, chosen, pairs, x)
    made = projected_rows(experts, chosen, pairs, activated).sum(0)
    wanted = routed_in_torch(x, ids, shares, experts)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-3)
